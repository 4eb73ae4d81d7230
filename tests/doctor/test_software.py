"""Python and packages, with versions that were never installed."""

import pytest

from mjax.doctor import GREEN, RED, YELLOW
from mjax.doctor.software import check_jax, check_packages, check_python
from mjax.utils import packages


def pretend(monkeypatch, **versions):
    """Install these packages too, or remove those with version None, and any other plugin for CUDA."""
    found = {name: version for name, version in packages.installed().items() if not name.startswith("jax-cuda")}
    found |= {name.replace("_", "-"): version for name, version in versions.items()}
    found = {name: version for name, version in found.items() if version is not None}
    monkeypatch.setattr(packages, "installed", lambda: found)


@pytest.mark.parametrize(("version", "status"), [((3, 10, 4), RED), ((3, 13, 0), GREEN), ((3, 14, 0), YELLOW)])
def test_python_is_one_of_those_tested(version, status):
    (finding,) = check_python(version)
    assert finding.status == status
    assert finding.found.startswith(".".join(map(str, version)))


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


JAX, JAXLIB = packages.installed()["jax"], packages.installed()["jaxlib"]


@pytest.mark.parametrize(
    ("versions", "status"),
    [
        ({"jaxlib": "0.4.30"}, RED),
        ({"jaxlib": None}, RED),
        ({"jax_cuda13_plugin": JAXLIB}, RED),
        ({"jax_cuda13_plugin": "0.9.0", "jax_cuda13_pjrt": JAXLIB}, RED),
        ({f"jax_cuda{major}_{half}": JAXLIB for major in (12, 13) for half in ("plugin", "pjrt")}, YELLOW),
    ],
    ids=["old jaxlib", "no jaxlib", "half a plugin", "old plugin", "two builds"],
)
def test_jax_and_its_parts_must_fit(monkeypatch, versions, status):
    pretend(monkeypatch, **versions)
    assert check_jax()[0].status == status
