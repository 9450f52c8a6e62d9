# SPDX-License-Identifier: Apache-2.0
"""NworConfig: the only reader of the `VLLM_NWOR_*` environment variables.

A value that is not allowed raises `NworConfigError`, which names the variable, the
value and the allowed ones; it never falls back to the default. An empty value means the
default, because container templates pass empty values on.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path


class Mode(enum.StrEnum):
    """What happens to the KV entries of draft tokens.

    OFF: plain vLLM, nothing is wrapped.
    COW: old bytes are logged before the forward, rejected slots restored after it.
    STAGE: drafts are verified in shadow blocks, and only kept rows are copied to the
        request's blocks; a KV-cache group that cannot have shadow blocks uses COW.
    """

    OFF = "off"
    STAGE = "stage"
    COW = "cow"


class Strict(enum.StrEnum):
    """When a failure of NWOR raises instead of falling back to plain vLLM.

    NEVER: at no time. STARTUP: a refusal at start-up raises. ALWAYS: a failure in a
    step raises too, and ends a running engine.
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
    """What the KV audit does with its findings.

    OFF: there is no audit, and none of its hooks. LOG: findings are logged and counted.
    RAISE: in addition, the tokens of their step do not leave the worker.
    """

    OFF = "off"
    LOG = "log"
    RAISE = "raise"


class StaleMode(enum.StrEnum):
    """What the KV audit does with a block that other weights have written.

    FIND: a finding as any other. COUNT: it is counted alone, for those who keep the
    prefix cache across changes of the weights on purpose.
    """

    FIND = "find"
    COUNT = "count"


class Store(enum.StrEnum):
    """Who fills the store of a KV connector.

    AUTO: this engine alone if it is vLLM's OffloadingConnector, with the store in the
        memory of this process; others, too, if it is another one. OWN: this engine
        alone, and the store is empty when it starts. SHARED: others, too.
    """

    AUTO = "auto"
    OWN = "own"
    SHARED = "shared"


class NworConfigError(ValueError):
    """`VLLM_NWOR_*` variables hold values that are not allowed.

    problems: a sentence for each.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


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
    AUDIT_STALE := "VLLM_NWOR_AUDIT_STALE",
    AUDIT_STORE := "VLLM_NWOR_AUDIT_STORE",
    AUDIT_INCIDENT := "VLLM_NWOR_AUDIT_INCIDENT",
    AUDIT_INCIDENT_TOKENS := "VLLM_NWOR_AUDIT_INCIDENT_TOKENS",
    AUDIT_SECRET := "VLLM_NWOR_AUDIT_SECRET",
)
SWITCH = ("0", "1")
# MiB of cache that the audit compares in a step, unless AUDIT_MIB is set.
DEFAULT_AUDIT_MIB = 32
# Longer numbers are typing errors; Python refuses to read those of thousands of digits.
MAX_DIGITS = 100
# As short as `openssl rand -hex 16` makes one.
MIN_SECRET_BYTES = 32


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
    audit_stale: StaleMode = StaleMode.FIND
    audit_store: Store = Store.AUTO
    on_reject: OnReject = OnReject.RESTORE
    audit_incident: str = ""
    audit_secret: str = ""
    audit_incident_tokens: bool = False

    @property
    def strict(self) -> bool:
        """Whether a refusal at start-up raises."""
        return self.strictness is not Strict.NEVER

    @property
    def strict_steps(self) -> bool:
        """Whether a failure in a step raises."""
        return self.strictness is Strict.ALWAYS

    @classmethod
    def from_env(
        cls, env: Mapping[str, str] | None = None, looks_at_files: bool = False
    ) -> NworConfig:
        """Reads `env` (default: this process's environment).

        looks_at_files: whether to check that this process can write the audit's files.
            False in a running engine, which must not end because of a file.

        Raises:
            NworConfigError: naming each variable, its value and the allowed ones.
        """
        read = _Reader(os.environ if env is None else env)
        blocks = "5 % of the blocks", "KV blocks"
        audit_mib = read.number(AUDIT_MIB, f"{DEFAULT_AUDIT_MIB}", "MiB a step", 0)
        config = cls(
            mode=Mode(read.choice(MODE, Mode, "off")),
            emit_metrics=read.choice(EMIT_METRICS, SWITCH, "1") == "1",
            strictness=Strict(read.choice(STRICT, Strict, "0")),
            debug_sync=read.choice(DEBUG_SYNC, SWITCH, "0") == "1",
            max_log_rows=read.number(MAX_LOG_ROWS, "no cap", "rows", 1),
            max_shadow_blocks=read.number(SHADOW_BLOCKS, *blocks, 0),
            audit=AuditMode(read.choice(AUDIT, AuditMode, "off")),
            audit_mib=DEFAULT_AUDIT_MIB if audit_mib is None else audit_mib,
            audit_file=read.env.get(AUDIT_FILE, ""),
            audit_stale=StaleMode(read.choice(AUDIT_STALE, StaleMode, "find")),
            audit_store=Store(read.choice(AUDIT_STORE, Store, "auto")),
            on_reject=OnReject(read.choice(ON_REJECT, OnReject, "restore")),
            audit_incident=read.env.get(AUDIT_INCIDENT, ""),
            audit_secret=read.env.get(AUDIT_SECRET, ""),
            audit_incident_tokens=read.choice(AUDIT_INCIDENT_TOKENS, SWITCH, "0")
            == "1",
        )
        is_poison = config.on_reject is OnReject.POISON
        if is_poison and config.mode is not Mode.COW and MODE not in read.bad:
            read.bad[ON_REJECT] = (
                f"{ON_REJECT}='poison' is for {MODE}='cow' alone, and the mode is "
                f"{config.mode.value!r}"
            )
        is_audited = config.audit is not AuditMode.OFF or AUDIT in read.bad
        if looks_at_files and is_audited:
            for name in (AUDIT_FILE, AUDIT_INCIDENT):
                read.bad[name] = audit_file_problem(name, read.env.get(name, ""))
            try:
                secret_in(config.audit_secret)
            except NworConfigError as error:
                read.bad[AUDIT_SECRET] = str(error)
        if problems := [problem for problem in read.bad.values() if problem]:
            raise NworConfigError(*problems)
        return config


class _Reader:
    """Reads single variables; a bad value counts as the default.

    bad: a sentence for each bad value, by the variable's name.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self.bad: dict[str, str] = {}

    def choice(self, name: str, choices: Iterable[str], default: str) -> str:
        value = self.env.get(name) or default
        if value in list(choices):
            return value
        self.bad[name] = _not_allowed(name, value, ", ".join(choices))
        return default

    def number(self, name: str, empty: str, unit: str, least: int) -> int | None:
        if not (value := self.env.get(name)):
            return None
        is_number = value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS
        if is_number and int(value) >= least:
            return int(value)
        allowed = f"empty ({empty}) or a whole number of {unit}, at least {least}"
        self.bad[name] = _not_allowed(name, value, allowed)
        return None


def audit_file_problem(name: str, value: str) -> str:
    """Why this process cannot write to the variable's file, a sentence; empty if
    it can, or if `value` is empty. The file is replaced as a whole, so the folder must
    be writable."""
    path = Path(value)
    if not value:
        return ""
    if path.is_dir():
        why = "it is a folder"
    elif not path.parent.is_dir():
        why = f"there is no folder {str(path.parent)!r}"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        why = f"this process cannot write to the folder {str(path.parent)!r}"
    else:
        return ""
    allowed = "empty or a path in a folder that exists and that this process can write"
    return _not_allowed(name, value, f"{allowed} to", f" ({why})")


def secret_in(path: str) -> bytes:
    """A key, from the file of VLLM_NWOR_AUDIT_SECRET; empty without one. White space
    around the file's content does not count. Raises NworConfigError."""
    if not path:
        return b""
    try:
        content = Path(path).read_bytes().strip()
        why = f"it has {len(content)} bytes"
    except OSError as error:
        content, why = b"", error.strerror or "it cannot be read"
    if len(content) < MIN_SECRET_BYTES:
        allowed = f"empty or a file with at least {MIN_SECRET_BYTES} bytes"
        raise NworConfigError(_not_allowed(AUDIT_SECRET, path, allowed, f" ({why})"))
    return sha256(content).digest()


def _not_allowed(name: str, value: str, allowed: str, why: str = "") -> str:
    return f"{name}={value!r} is not allowed{why}; allowed values: {allowed}"
