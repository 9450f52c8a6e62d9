# SPDX-License-Identifier: Apache-2.0
"""NworConfig: the only reader of the `VLLM_NWOR_*` environment variables.

A value that is not allowed raises `NworConfigError`, which names the variable, the
value and what is allowed; it never silently means the default. Empty does: templates of
containers leave it where nothing was chosen.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class Mode(enum.StrEnum):
    """What happens to the KV entries of draft tokens.

    OFF: plain vLLM, nothing is wrapped.
    COW: old bytes are logged before the forward, rejected slots restored after it.
    STAGE: drafts are verified in shadow blocks, and only kept rows get into a request's
        own; a KV-cache group that cannot have them uses COW.
    """

    OFF = "off"
    STAGE = "stage"
    COW = "cow"


class Strict(enum.StrEnum):
    """Where a failure of ours raises instead of falling back to plain vLLM.

    NEVER: nowhere. STARTUP: what is refused at start-up. ALWAYS: what fails in a step,
    too, which ends a running engine.
    """

    NEVER = "0"
    STARTUP = "1"
    ALWAYS = "always"


class OnReject(enum.StrEnum):
    """What mode cow leaves at the slots of rejected drafts.

    RESTORE: what they held before the step. POISON: large numbers, so that a later read
    of such a slot shows in the logits.
    """

    RESTORE = "restore"
    POISON = "poison"


class AuditMode(enum.StrEnum):
    """What the KV audit does with what it finds.

    OFF: there is no audit, nothing of it is wrapped. LOG: findings are logged and
    counted. RAISE: besides, the tokens of their step do not leave the worker.
    """

    OFF = "off"
    LOG = "log"
    RAISE = "raise"


class NworConfigError(ValueError):
    """A `VLLM_NWOR_*` variable holds a value that is not allowed."""


ENV_NAMES = (
    MODE := "VLLM_NWOR_MODE",
    EMIT_METRICS := "VLLM_NWOR_EMIT_METRICS",
    STRICT := "VLLM_NWOR_STRICT",
    DEBUG_SYNC := "VLLM_NWOR_DEBUG_SYNC",
    MAX_LOG_ROWS := "VLLM_NWOR_MAX_LOG_ROWS",
    SHADOW_BLOCKS := "VLLM_NWOR_SHADOW_BLOCKS",
    ON_REJECT := "VLLM_NWOR_ON_REJECT",
    AUDIT := "VLLM_NWOR_AUDIT",
    AUDIT_MIB := "VLLM_NWOR_AUDIT_MIB",
    AUDIT_FILE := "VLLM_NWOR_AUDIT_FILE",
)
SWITCH = ("0", "1")
# MiB of cache whose bytes the audit compares in a step, unless AUDIT_MIB says.
DEFAULT_AUDIT_MIB = 32


@dataclass(frozen=True)
class NworConfig:
    """One process's settings; docs/variables.md has the table of variables."""

    mode: Mode = Mode.OFF
    emit_metrics: bool = True
    strictness: Strict = Strict.NEVER
    debug_sync: bool = False
    max_log_rows: int | None = None
    max_shadow_blocks: int | None = None
    audit: AuditMode = AuditMode.OFF
    audit_mib: int = DEFAULT_AUDIT_MIB
    audit_file: str = ""
    on_reject: OnReject = OnReject.RESTORE

    @property
    def strict(self) -> bool:
        """Whether a refusal at start-up raises."""
        return self.strictness is not Strict.NEVER

    @property
    def strict_steps(self) -> bool:
        """Whether a failure in a step raises."""
        return self.strictness is Strict.ALWAYS

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> NworConfig:
        """Reads `env` (default: this process's environment).

        Raises:
            NworConfigError: naming the variable, its value and the allowed ones.
        """
        env = os.environ if env is None else env
        blocks = "5 % of the blocks", "KV blocks"
        audit_mib = _number(env, AUDIT_MIB, f"{DEFAULT_AUDIT_MIB}", "MiB a step", 0)
        config = cls(
            mode=Mode(_choice(env, MODE, Mode, "off")),
            emit_metrics=_choice(env, EMIT_METRICS, SWITCH, "1") == "1",
            strictness=Strict(_choice(env, STRICT, Strict, "0")),
            debug_sync=_choice(env, DEBUG_SYNC, SWITCH, "0") == "1",
            max_log_rows=_number(env, MAX_LOG_ROWS, "no cap", "rows", 1),
            max_shadow_blocks=_number(env, SHADOW_BLOCKS, *blocks, 0),
            audit=AuditMode(_choice(env, AUDIT, AuditMode, "off")),
            audit_mib=DEFAULT_AUDIT_MIB if audit_mib is None else audit_mib,
            audit_file=env.get(AUDIT_FILE, ""),
            on_reject=OnReject(_choice(env, ON_REJECT, OnReject, "restore")),
        )
        if config.on_reject is OnReject.POISON and config.mode is not Mode.COW:
            raise NworConfigError(
                f"{ON_REJECT}='poison' is for {MODE}='cow' alone, and the mode is "
                f"{config.mode.value!r}"
            )
        return config


def _choice(
    env: Mapping[str, str], name: str, choices: Iterable[str], default: str
) -> str:
    value = env.get(name) or default
    if value not in list(choices):
        raise _not_allowed(name, value, ", ".join(choices))
    return value


def _number(
    env: Mapping[str, str], name: str, empty: str, unit: str, least: int
) -> int | None:
    if not (value := env.get(name)):
        return None
    if not (value.isascii() and value.isdigit() and int(value) >= least):
        allowed = f"empty ({empty}) or a whole number of {unit}, at least {least}"
        raise _not_allowed(name, value, allowed)
    return int(value)


def _not_allowed(name: str, value: str, allowed: str) -> NworConfigError:
    text = f"{name}={value!r} is not allowed; allowed values: {allowed}"
    return NworConfigError(text)
