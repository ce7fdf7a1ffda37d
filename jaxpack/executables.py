"""Compiled programs: each compiled once in the life of the process, and counted.

Worker threads ask for programs by what they compute. The first to ask compiles, the
others wait for it, and different programs compile at the same time.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxpack.types import PyTree

LIMIT = 512
"""Compiled programs kept; the oldest goes first."""

_cache: dict[Hashable, Future] = {}
_lock = threading.Lock()
_thread = threading.local()


class CompileLog:
    """Counts the compilations of one call, by program name.

    A program that was found in the persistent compilation cache costs time but does
    not count as compiled.

    Attributes:
      compiles: Programs compiled, by name.
      seconds: Time spent tracing, lowering and compiling, over all threads.
    """

    def __init__(self) -> None:
        self.compiles: Counter[str] = Counter()
        self.seconds = 0.0
        self._lock = threading.Lock()

    def add(self, name: str, seconds: float, *, compiled: bool) -> None:
        """Records one compilation."""
        with self._lock:
            self.seconds += seconds
            self.compiles[name] += compiled


def get(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[PyTree],
    *,
    identity: Hashable,
    device: jax.Device,
    log: CompileLog,
    donate: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Returns `function` compiled for these shapes on this device.

    Args:
      name: What the program is called in profiles and in the log.
      function: A pure function of `arguments`.
      arguments: Shapes and dtypes (`jax.ShapeDtypeStruct`) of its arguments.
      identity: What the function computes: functions of one name and identity are
        taken to be the same.
      device: Where it runs.
      log: Where a compilation is recorded.
      donate: Arguments whose memory the results may take over.
    """
    leaves, structure = jax.tree.flatten(tuple(arguments))
    shapes = tuple((leaf.shape, str(leaf.dtype), leaf.weak_type) for leaf in leaves)
    key = (name, identity, shapes, structure, device)
    with _lock:
        future = _cache.get(key)
        mine = future is None
        if future is None:
            future = _cache[key] = Future()
            while len(_cache) > LIMIT:
                del _cache[next(iter(_cache))]
    if mine:
        try:
            future.set_result(_compile(name, function, arguments, device, log, donate))
        except BaseException as error:
            with _lock:
                _cache.pop(key, None)
            future.set_exception(error)
    return future.result()


def clear() -> None:
    """Forgets every compiled program, and frees its memory once it is not in use."""
    with _lock:
        _cache.clear()


def _compile(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[PyTree],
    device: jax.Device,
    log: CompileLog,
    donate: tuple[int, ...],
) -> Callable[..., Any]:
    def named(*args: Any) -> Any:
        return function(*args)

    named.__name__ = named.__qualname__ = name
    sharding = SingleDeviceSharding(device)

    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, weak_type=leaf.weak_type, sharding=sharding
        )

    start = time.perf_counter()
    _thread.cache_hit = False
    lowered = jax.jit(named, donate_argnums=donate).lower(
        *jax.tree.map(placed, tuple(arguments))
    )
    compiled = lowered.compile()
    log.add(name, time.perf_counter() - start, compiled=not _thread.cache_hit)
    return compiled


def _on_event(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _thread.cache_hit = True


jax.monitoring.register_event_listener(_on_event)
