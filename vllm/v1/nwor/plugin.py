# SPDX-License-Identifier: Apache-2.0
"""register(): vLLM's way into this package (entry point `vllm.general_plugins`).

vLLM calls it once in every process it starts: front end, engine core, workers. With
`VLLM_NWOR_MODE` and `VLLM_NWOR_AUDIT` off it makes the variables known to vLLM, makes
this package importable as `vllm.v1.nwor`, and returns: nothing is wrapped and no import
hook is left pending. Otherwise it registers post-import hooks, so that a process which
never imports a model runner has no cost.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from .config import ENV_NAMES, AuditMode, Mode, NworConfig, NworConfigError

logger = logging.getLogger("vllm.v1.nwor")

# Module of vLLM -> our module that hooks it (its `install`), relative to this package.
HOOKS = {
    "vllm.v1.worker.gpu_model_runner": ".hooks.runner_v1",
    "vllm.v1.worker.gpu.model_runner": ".hooks.runner_v2",
    "vllm.v1.engine.core": ".hooks.info",
    "vllm.v1.engine.core_client": ".hooks.info",
    "vllm.v1.core.sched.scheduler": ".hooks.scheduler",
    "vllm.v1.metrics.loggers": ".hooks.front_end",
}

# Additional hooks of the KV audit; `.hooks.scheduler` then also wraps `schedule`.
AUDIT_HOOKS = {
    "vllm.v1.engine.core": ".hooks.weights",
    "vllm.lora.model_manager": ".hooks.adapters",
    "vllm.v1.worker.gpu_worker": ".hooks.worker",
    "vllm.v1.worker.gpu.model_states.mamba_hybrid": ".hooks.states",
    "vllm.device_allocator.cumem": ".hooks.worker",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": (
        ".hooks.connectors"
    ),
    "vllm.v1.core.sched.scheduler": ".hooks.scheduler",
}

# The modules that build a model runner's observers, from the outermost to the innermost
# (step.py): the audit plans before shadow blocks go in, and resolves after commit.
BUILDERS = (".audit.build", ".transaction.build")


def hooks_of(config: NworConfig) -> list[dict[str, str]]:
    """HOOKS, AUDIT_HOOKS, as the modes ask for them."""
    if config.audit is not AuditMode.OFF:
        return [HOOKS, AUDIT_HOOKS]
    return [] if config.mode is Mode.OFF else [HOOKS]


# Those of HOOKS and AUDIT_HOOKS that register() has registered.
_registered: list[dict[str, str]] = []


def register() -> None:
    """Reads the modes and, unless both are off, registers the hooks on vLLM.

    If a fork of vLLM carries this package, calls that copy's register() instead, so
    that nothing is wrapped twice.

    Idempotent. Raises NworConfigError on bad `VLLM_NWOR_*` values, in any mode: vLLM
    does not start, and prints that sentence alone, without a traceback.
    """
    if (used := used_package()) != __package__:
        import_module(f"{used}.plugin").register()
        return
    config = _checked_config()
    wanted = [hooks for hooks in hooks_of(config) if hooks not in _registered]
    if wanted:
        _check_host()
    # Their values stay hidden: vLLM's compile cache key is the same in every mode.
    known = getattr(_module_of_vllm("vllm.envs"), "environment_variables", {})
    for name in ENV_NAMES:
        known.setdefault(name, lambda: None)
    _Alias.install()
    for hooks in wanted:
        import wrapt

        for module_name, hook in hooks.items():
            wrapt.register_post_import_hook(_guarded(hook), module_name)
        _registered.append(hooks)


def _checked_config() -> NworConfig:
    """The configuration, with the audit's file checked, before an engine starts."""
    try:
        return NworConfig.from_env(looks_at_files=True)
    except NworConfigError:
        if getattr(sys.excepthook, "func", None) is not _without_traceback:
            sys.excepthook = partial(_without_traceback, sys.excepthook)
        raise


def _without_traceback(
    other: Callable[..., None], kind: type[BaseException], error: Any, trace: Any
) -> None:
    """sys.excepthook that prints a NworConfigError without its traceback, which does
    not help the user who set the value. `other` handles every other exception."""
    if isinstance(error, NworConfigError):
        print(f"vllm-nwor: {error}", file=sys.stderr)
    else:
        other(kind, error, trace)


def hook_module(name: str) -> None:
    """Hooks a module of vLLM now. A fork that carries this package calls this at the
    end of each such module (tools/apply_to_vllm.py), and needs no plugin.

    While the modes are off it imports nothing but `config`. Raises NworConfigError, as
    register(); HostMismatch under VLLM_NWOR_STRICT.
    """
    for hooks in hooks_of(_checked_config()):
        if name in hooks:
            _check_host()
            _guarded(hooks[name])(sys.modules[name])


def _module_of_vllm(name: str) -> ModuleType | None:
    """None if vLLM has no such module, or is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def used_package() -> str:
    """This package, or the copy that a fork of vLLM carries. Imports no vLLM."""
    file = getattr(find_spec("vllm"), "origin", None)  # None: an empty namespace
    is_carried = file and Path(file).parent.joinpath("v1/nwor/plugin.py").is_file()
    return _Alias.NAME if is_carried else __package__


class _Alias(MetaPathFinder, Loader):
    """Makes `import vllm.v1.nwor`, and imports below it, return the modules of this
    package: the same objects, never a second copy. A fork does not need it.
    """

    NAME = "vllm.v1.nwor"

    @classmethod
    def install(cls) -> None:
        if __package__ != cls.NAME and not any(
            isinstance(finder, cls) for finder in sys.meta_path
        ):
            # First: the path of the aliased package would load second copies.
            sys.meta_path.insert(0, cls())

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        is_ours = f"{fullname}.".startswith(f"{self.NAME}.")
        return ModuleSpec(fullname, self) if is_ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(f"{__package__}{spec.name.removeprefix(self.NAME)}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's own spec, which the import system has replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


@cache  # one warning
def _check_host() -> None:
    vllm = _module_of_vllm("vllm")
    if vllm is None:
        raise RuntimeError(
            "vllm-nwor: vLLM is not installed; install the build of vLLM for your "
            "hardware, then vllm-nwor next to it"
        )
    if getattr(vllm, "__file__", None) is None:
        raise RuntimeError(
            "vllm-nwor: `import vllm` finds an empty namespace instead of vLLM, in "
            f"{', '.join(vllm.__path__)}; without vLLM, install it; with an editable "
            "one, start Python elsewhere or remove that folder"
        )
    from .hooks.versions import VERSIONS

    version = getattr(vllm, "__version__", "unknown")
    if version.split("+")[0] not in VERSIONS:
        text = "NWOR has not been tried with vLLM %s (tried: %s); "
        text += "it runs if every signature it relies on matches"
        logger.warning(text, version, ", ".join(VERSIONS))


def _guarded(hook: str) -> Callable[[ModuleType], None]:
    """A post-import hook. If vLLM is not as expected, it logs one line, or raises under
    VLLM_NWOR_STRICT."""

    def run(module: ModuleType) -> None:
        try:
            install = import_module(hook, __package__).install
            if hook.startswith(".hooks.runner"):
                builders = [import_module(name, __package__) for name in BUILDERS]
                install = partial(install, builders=builders)
            install(module)
        except Exception as error:  # HostMismatch, or any unexpected error
            if NworConfig.from_env().strict:
                raise
            logger.error("NWOR is off for %s: %s", module.__name__, error)

    return run
