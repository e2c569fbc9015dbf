"""Strict settings for every test: annotations checked at run time, no silent rank promotion, full precision,
one compile cache."""

import contextlib
import os
import re
import shutil
import signal
import typing as tp
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

# Before jax is imported anywhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Compiling is most of a test run: without optimisation it takes a quarter less in all, and a quarter less
    # again by the plainer of two emitters that XLA had until JAX 0.10.
    plainer = " --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""
    os.environ.setdefault("XLA_FLAGS", f"--xla_backend_optimization_level=0{plainer}")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/sable/xla"))

from jaxtyping import install_import_hook

install_import_hook(
    [
        "sable.ops",
        "sable.nets.actor_critic",
        "sable.nets.layers",
        "sable.nets.mat",
        "sable.nets.gru",
        "sable.nets.retention",
        "sable.nets.embeddings",
        "sable.nets.qmix",
    ],
    "beartype.beartype",
)

import jax  # noqa: E402
import pytest  # noqa: E402

from sable.errors import SableError  # noqa: E402
from sable.runs import open_run as running  # noqa: E402
from sable.training import interruption  # noqa: E402

# Under nohup a hang-up is ignored, here and in every process that a test starts and sends one to.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

pytest_plugins = ["tests.finished_runs"]

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True)
def strict_ranks(request):
    """Around ops, nets and systems, adding arrays of different ranks raises; the suites' own code would not
    survive it."""
    strict = {"ops", "nets", "systems"} & set(request.path.parts)
    with jax.numpy_rank_promotion("raise" if strict else "allow"):
        yield


@pytest.fixture(autouse=True, scope="session")
def patience():
    """A test may signal its own process, which must not be ended because a busy machine compiles slowly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interruption, "PATIENCE", 3600.0)
        yield


@pytest.fixture(autouse=True, scope="module")
def no_films(request):
    """Training ends with a film, which takes seconds to compile: only the tests about it wait for one."""
    with pytest.MonkeyPatch.context() as patch:
        if "viewer" not in request.path.parts:
            patch.setattr(running, "write_video", lambda *args, **fields: None)
        yield


SMALL = {"video": False, "total_steps": 64, "num_evaluations": 4, "evaluation_episodes": 2}
SMALL |= {"absolute_episodes": 2, "num_envs": 4, "rollout_length": 4, "num_minibatches": 1}
SMALL |= {"num_epochs": 1, "policy_layers": (8,), "critic_layers": (8,), "seeds": (0, 1)}


@pytest.fixture(scope="session")
def stopped_run(tmp_path_factory):
    """The folder of a tiny run that was stopped after the second of its four evaluations; to be copied."""
    import sable
    from sable.training import loop
    from sable.training.loggers import logger as logging

    class Stopping(logging.Logger):
        def evaluation(self, steps, metrics):
            super().evaluation(steps, metrics)
            if steps == 32:
                signal.raise_signal(signal.SIGTERM)

    out = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Logger", Stopping)
        result = sable.train("probe/bandit", system="ippo", out=out, name="r", quiet=True, **SMALL)
    assert result.interrupted == signal.SIGTERM
    return result.directory


@pytest.fixture(scope="session")
def finished_run(stopped_run, tmp_path_factory):
    """The folder of the same run at its end; to be copied."""
    import sable

    directory = shutil.copytree(stopped_run, tmp_path_factory.mktemp("finished") / "run")
    sable.train(resume=directory, quiet=True)
    return directory


@pytest.fixture
def triton_modules(monkeypatch):
    """The Triton modules that are lowered, each verified: as much as a machine without a GPU can tell."""
    from jax._src.pallas.triton import lowering
    from jax._src.pallas.triton import pallas_call_registration as registration

    if hasattr(registration, "gpu_info_lib"):  # JAX 0.11 asks which GPU it is for
        hopper = SimpleNamespace(compute_capability=90)
        monkeypatch.setattr(registration.gpu_info_lib, "get_gpu_info", lambda: hopper)
    modules = []

    def lower(*args, real=lowering.lower_jaxpr_to_triton_module, **named):
        result = real(*args, **named)
        result.module.operation.verify()
        modules.append(result)
        return result

    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", lower)
    return modules


WITHOUT = ("jaxmarl", "brax", "gymnax") if os.environ.get("SABLE_TEST_WITHOUT") == "jaxmarl" else ()
"""Packages of the extra that `make test-next` leaves out: tests that need one are skipped, and say so.
Anywhere else they fail."""


def pytest_ignore_collect(collection_path):
    """Files that import such a package as they begin cannot even be collected."""
    if WITHOUT and collection_path.is_file() and collection_path.suffix == ".py":
        imports = re.findall(r"^(?:import|from) (\w+)", collection_path.read_text(), re.MULTILINE)
        if set(imports) & set(WITHOUT):
            return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    return (yield from _skip_what_needs_the_extra())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from _skip_what_needs_the_extra())


def _skip_what_needs_the_extra():
    try:
        return (yield)
    except (SableError, ImportError) as error:
        missing = re.search(r"needs (\w+), which is not installed|No module named '(\w+)", str(error))
        if missing and (missing[1] or missing[2]) in WITHOUT:
            pytest.skip(f"needs {missing[1] or missing[2]}, which is left out")
        raise


LONG = ("test_loop", "test_kills", "test_benchmark", "test_probes", "test_plan", "test_tune")


def pytest_collection_modifyitems(items):
    """Files that take long come first, so that no process is left alone with one at the end."""
    items.sort(key=lambda item: item.path.stem not in LONG)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Each compiled program maps memory, and a process may hold only so many maps: compiling aborts there."""
    yield
    jax.clear_caches()


# Chromium as root in a container, with nothing of its own to say to anyone.
CHROMIUM_FLAGS = ("no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync")
CHROMIUM_FLAGS += ("disable-background-networking", "disable-component-update", "disable-dev-shm-usage")


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if not found:
        pytest.fail(
            "no Chromium: install it (Debian: apt-get install chromium) or name it with CHROMIUM=path"
        )
    flags = [f"--{flag}" for flag in CHROMIUM_FLAGS]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """A function that opens a page from disk with no network; at the end, nothing was complained of and
    nothing asked for."""

    @contextlib.contextmanager
    def opened(path: Path, *, width: int, scheme: tp.Literal["light", "dark"] = "light"):
        context = browser.new_context(
            offline=True,
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            has_touch=width < 500,
        )
        context.set_default_timeout(5000)
        page = context.new_page()
        said, asked = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        yield page
        assert said == [] and set(asked) == {path.as_uri()}
        context.close()

    return opened
