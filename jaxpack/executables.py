"""Compiled programs: each compiled once in the life of the process, and counted.

Worker threads ask for programs by what they compute. The first to ask compiles, the
others wait for it, and different programs compile at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
from jax import experimental
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

from jaxpack.types import PyTree

LIMIT = 512
"""Compiled programs kept; the oldest goes first."""

_cache: dict[Hashable, Future] = {}
_lock = threading.Lock()
_thread = threading.local()
_disk_cache_users = 0
_X64 = "enable_x64"
_TRACED_UNDER = {
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_default_prng_impl": jax.default_prng_impl,
    # Where it was before it moved up.
    "jax_enable_x64": getattr(
        jax if hasattr(jax, "enable_x64") else experimental, _X64
    ),
}
"""Settings that JAX keeps for each thread, with the context that sets each."""
_saved_settings: dict[str, Any] = {}
# An initialisation compiles in a third of the time and runs as fast for its size.
_HASTY: dict[str, bool | str] = {"xla_backend_optimization_level": "1"}


class CompileLog:
    """Counts the compilations of one call, by program name.

    A program that was found in the persistent compilation cache costs time but does
    not count as compiled.

    Attributes:
      compiles: Programs compiled, by name.
      seconds: Time spent tracing, lowering and compiling, over all threads.
      spans: The same one by one: when it ended (`time.perf_counter`), and how long.
    """

    def __init__(self) -> None:
        self.compiles: Counter[str] = Counter()
        self.seconds = 0.0
        self.spans: list[tuple[float, float]] = []
        self._lock = threading.Lock()

    def add(self, name: str, *, compiled: bool) -> None:
        """Records a program that has become ready."""
        with self._lock:
            self.compiles[name] += compiled

    def add_seconds(self, seconds: float) -> None:
        """Records time spent on the way to a program."""
        with self._lock:
            self.seconds += seconds
            self.spans.append((time.perf_counter(), seconds))


def get(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[PyTree],
    *,
    identity: Hashable,
    device: jax.Device,
    log: CompileLog,
    donate: tuple[int, ...] = (),
    runs_rarely: bool = False,
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
      runs_rarely: Whether time spent optimising it would not come back.
    """
    leaves, structure = jax.tree.flatten(tuple(arguments))
    shapes = tuple((leaf.shape, str(leaf.dtype), leaf.weak_type) for leaf in leaves)
    key = (name, identity, shapes, structure, device, settings())
    with _lock:
        future = _cache.get(key)
        mine = future is None
        if future is None:
            future = _cache[key] = Future()
            while len(_cache) > LIMIT:
                del _cache[next(iter(_cache))]
    if mine:
        try:
            lowered = _lower(name, function, arguments, device, log, donate)
            options = _HASTY if runs_rarely and device.platform == "cpu" else None
            future.set_result(_compile(name, lowered, log, options))
        except BaseException as error:
            with _lock:
                _cache.pop(key, None)
            future.set_exception(error)
    return future.result()


def memory_bytes(program: Any) -> int:
    """What a program from `get` takes on its device: arguments, results and scratch.

    Results that take over the memory of arguments are counted once.
    """
    size = program.memory_analysis()
    arguments, results = size.argument_size_in_bytes, size.output_size_in_bytes
    return arguments + results - size.alias_size_in_bytes + size.temp_size_in_bytes


def out_of_memory(error: BaseException) -> bool:
    """Whether a device ran out of memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and (
        "RESOURCE_EXHAUSTED" in str(error)
    )


def clear() -> None:
    """Forgets every compiled program, and frees its memory once it is not in use."""
    with _lock:
        _cache.clear()


@contextlib.contextmanager
def disk_cache() -> Generator[None]:
    """Keeps compiled programs on disk, from one process to the next.

    In the user's cache directory, programs of any size and compile time. Where the
    user has set a directory for JAX's compilation cache, or turned it off, everything
    stays as set; afterwards it is as it was before.
    """
    global _disk_cache_users
    with _lock:
        _disk_cache_users += 1
        if _disk_cache_users == 1:
            _saved_settings.update(_use_directory(cache_directory()))
    try:
        yield
    finally:
        with _lock:
            _disk_cache_users -= 1
            if _disk_cache_users == 0 and _saved_settings:
                for name, value in _saved_settings.items():
                    jax.config.update(name, value)
                _saved_settings.clear()
                compilation_cache.reset_cache()


def _use_directory(directory: Path) -> dict[str, Any]:
    """Points JAX's compilation cache there; returns the settings it replaced."""
    (chosen,) = _settings("jax_compilation_cache_dir")
    if chosen or not disk_cache_wanted():
        return {}
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:  # No home, or a read-only one: compile without a cache.
        return {}
    settings = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    saved = dict(zip(settings, _settings(*settings), strict=True))
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    return saved


def settings() -> tuple[Any, ...]:
    """JAX's settings in this thread that what is traced depends on."""
    return tuple(_settings(*_TRACED_UNDER))


@contextlib.contextmanager
def under(values: tuple[Any, ...]) -> Generator[None]:
    """Gives this thread the settings of another one.

    Args:
      values: What `settings` returned there.
    """
    with contextlib.ExitStack() as stack:
        for context, value in zip(_TRACED_UNDER.values(), values, strict=True):
            stack.enter_context(context(value))
        yield


def disk_cache_wanted() -> bool:
    """Whether the user has left JAX's compilation cache on."""
    (enabled,) = _settings("jax_enable_compilation_cache")
    return enabled


def _settings(*names: str) -> list[Any]:
    return [getattr(jax.config, name) for name in names]


def cache_directory() -> Path:
    """Where programs and measurements are kept: one directory a kind of processor.

    Code for one kind may not run on another.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    features = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features += next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        features += platform.processor()
    kind = hashlib.sha256(features.encode()).hexdigest()[:12]
    return Path(home).expanduser() / "jaxpack" / f"xla-{jax.__version__}-{kind}"


def _lower(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[PyTree],
    device: jax.Device,
    log: CompileLog,
    donate: tuple[int, ...],
) -> Any:
    def named(*args: Any) -> Any:
        return function(*args)

    named.__name__ = named.__qualname__ = name
    sharding = SingleDeviceSharding(device)

    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, weak_type=leaf.weak_type, sharding=sharding
        )

    start = time.perf_counter()
    lowered = jax.jit(named, donate_argnums=donate).lower(
        *jax.tree.map(placed, tuple(arguments))
    )
    log.add_seconds(time.perf_counter() - start)
    return lowered


def _compile(
    name: str, lowered: Any, log: CompileLog, options: dict[str, bool | str] | None
) -> Callable[..., Any]:
    start = time.perf_counter()
    _thread.cache_hit = False
    compiled = lowered.compile(compiler_options=options)
    log.add(name, compiled=not _thread.cache_hit)
    log.add_seconds(time.perf_counter() - start)
    return compiled


def _on_event(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _thread.cache_hit = True


jax.monitoring.register_event_listener(_on_event)
