"""Python and packages, with versions that were never installed."""

from importlib import metadata

import pytest

from mjax import packages
from mjax.doctor import software
from mjax.doctor.finding import GREEN, RED, YELLOW
from mjax.doctor.software import check_jax, check_packages, check_python


def pretend(monkeypatch, **versions):
    """Have these packages installed too, or not at all where the version is None."""
    found = packages.installed() | {name.replace("_", "-"): version for name, version in versions.items()}
    found = {name: version for name, version in found.items() if version is not None}
    monkeypatch.setattr(packages, "installed", lambda: found)


def pretend_cuda(monkeypatch, **versions):
    """The same, and none else of jax's plugins for CUDA."""
    plugins = [name.replace("-", "_") for name in packages.installed() if name.startswith("jax-cuda")]
    pretend(monkeypatch, **dict.fromkeys(plugins) | versions)


def test_old_python_is_red():
    assert check_python()[0].status == GREEN
    old = check_python((3, 10, 4))[0]
    assert old.status == RED
    assert "3.10.4" in old.found


def test_installed_packages_fit():
    assert [finding.status for finding in check_packages() + check_jax()] == [GREEN, GREEN]


@pytest.mark.parametrize(
    ("package", "version", "status", "words"),
    [
        ("optax", None, RED, "not installed: optax"),
        ("flax", "0.8.1", RED, "flax 0.8.1"),
        ("orbax_checkpoint", "0.13.0", YELLOW, "orbax-checkpoint 0.13.0"),
    ],
)
def test_wrong_version_of_package_is_named(monkeypatch, package, version, status, words):
    pretend(monkeypatch, **{package: version})
    (finding,) = check_packages()
    assert finding.status == status
    assert words in finding.found
    assert finding.advice.startswith(f'pip install "{package.replace("_", "-")}')


def test_two_lines_on_a_package_both_hold():
    (finding,) = check_packages(["numpy>=2.0", "NumPy<1000", "jax"])
    assert finding.found.startswith("all 2 required packages")
    (finding,) = check_packages(["numpy<1.0", "numpy>=0.1"])
    assert (finding.status, finding.advice) == (YELLOW, 'pip install "numpy<1.0,>=0.1"')


def test_installed_package_names_its_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(software.mjax, "__file__", str(tmp_path / "mjax" / "__init__.py"))
    monkeypatch.setattr(metadata, "requires", lambda name: ["no-such-package>=1", 'lm-eval>=1; extra == "lm-eval"'])
    (finding,) = check_packages()
    assert finding.found == "not installed: no-such-package"


JAX, JAXLIB = packages.installed()["jax"], packages.installed()["jaxlib"]


def test_cuda_plugin_must_match_jaxlib(monkeypatch):
    pretend_cuda(monkeypatch, jax_cuda13_plugin="0.9.0", jax_cuda13_pjrt=JAXLIB)
    (finding,) = check_jax()
    assert finding.status == RED
    assert "jax-cuda13-plugin 0.9.0" in finding.found
    assert finding.advice == f'pip install --upgrade "jax[cuda13]=={JAX}"'


@pytest.mark.parametrize(
    ("versions", "status"),
    [
        ({"jaxlib": "0.4.30"}, RED),
        ({"jax": None}, RED),
        ({"jaxlib": None}, RED),
        ({"jax_cuda13_plugin": JAXLIB}, RED),
        ({"jax_cuda13_pjrt": JAXLIB}, RED),
        ({f"jax_cuda{major}_{half}": JAXLIB for major in (12, 13) for half in ("plugin", "pjrt")}, YELLOW),
    ],
    ids=["old jaxlib", "no jax", "no jaxlib", "half a plugin", "the other half", "two builds"],
)
def test_jax_and_its_parts_must_fit(monkeypatch, versions, status):
    pretend_cuda(monkeypatch, **versions)
    assert check_jax()[0].status == status


def test_libraries_are_those_of_jaxs_cuda(monkeypatch):
    pretend_cuda(monkeypatch, jax_cuda13_plugin=JAXLIB, jax_cuda13_pjrt=JAXLIB)
    pretend(monkeypatch, nvidia_cudnn_cu12="9.1", nvidia_cudnn_cu13="9.2", nvidia_nccl_cu13="2.3")
    (finding,) = check_jax()
    assert finding.status == GREEN
    assert finding.found.endswith("the build for CUDA 13, with cuDNN 9.2 and NCCL 2.3")
