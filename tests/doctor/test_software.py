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


def test_this_python_is_new_enough_and_one_that_is_not_is_red():
    assert check_python()[0].status == GREEN
    old = check_python((3, 10, 4))[0]
    assert old.status == RED
    assert "3.10.4" in old.found


def test_what_is_installed_here_works_together():
    assert [finding.status for finding in check_packages() + check_jax()] == [GREEN, GREEN]


def test_a_missing_package_is_red_and_the_line_to_type_names_it(monkeypatch):
    pretend(monkeypatch, optax=None)
    (finding,) = check_packages()
    assert (finding.status, finding.advice) == (RED, 'pip install "optax<0.3,>=0.2.8"')


def test_a_package_older_than_the_requirement_is_red(monkeypatch):
    pretend(monkeypatch, flax="0.8.1")
    (finding,) = check_packages()
    assert finding.status == RED
    assert "flax 0.8.1" in finding.found


def test_a_package_newer_than_was_tried_is_yellow(monkeypatch):
    pretend(monkeypatch, orbax_checkpoint="0.13.0")
    (finding,) = check_packages()
    assert finding.status == YELLOW
    assert "orbax-checkpoint 0.13.0" in finding.found


def test_a_package_that_two_lines_name_is_one_package_that_both_hold_for():
    (finding,) = check_packages(["numpy>=2.0", "NumPy<1000", "jax"])
    assert finding.found.startswith("all 2 required packages")
    (finding,) = check_packages(["numpy<1.0", "numpy>=0.1"])
    assert (finding.status, finding.advice) == (YELLOW, 'pip install "numpy<1.0,>=0.1"')


def test_an_installed_package_without_its_source_tree_says_what_it_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(software.mjax, "__file__", str(tmp_path / "mjax" / "__init__.py"))
    monkeypatch.setattr(metadata, "requires", lambda name: ["no-such-package>=1", 'lm-eval>=1; extra == "lm-eval"'])
    (finding,) = check_packages()
    assert finding.found == "not installed: no-such-package"


def test_a_jaxlib_that_jax_does_not_take_is_red(monkeypatch):
    pretend(monkeypatch, jaxlib="0.4.30")
    (finding,) = check_jax()
    assert finding.status == RED
    assert "jaxlib 0.4.30" in finding.found


JAX, JAXLIB = packages.installed()["jax"], packages.installed()["jaxlib"]


def test_a_cuda_plugin_of_another_version_than_jaxlib_is_red(monkeypatch):
    pretend_cuda(monkeypatch, jax_cuda13_plugin="0.9.0", jax_cuda13_pjrt=JAXLIB)
    (finding,) = check_jax()
    assert finding.status == RED
    assert "jax-cuda13-plugin 0.9.0" in finding.found
    assert finding.advice == f'pip install --upgrade "jax[cuda13]=={JAX}"'


@pytest.mark.parametrize("half", ["plugin", "pjrt"])
def test_half_a_cuda_plugin_is_red(monkeypatch, half):
    pretend_cuda(monkeypatch, **{f"jax_cuda13_{half}": JAXLIB})
    assert check_jax()[0].status == RED


def test_two_cuda_builds_beside_each_other_are_yellow(monkeypatch):
    names = [f"jax_cuda{major}_{half}" for major in (12, 13) for half in ("plugin", "pjrt")]
    pretend_cuda(monkeypatch, **dict.fromkeys(names, JAXLIB))
    (finding,) = check_jax()
    assert finding.status == YELLOW
    assert "jax-cuda12-plugin" in finding.advice


def test_the_libraries_are_those_of_the_cuda_that_jax_is_built_for(monkeypatch):
    pretend_cuda(monkeypatch, jax_cuda13_plugin=JAXLIB, jax_cuda13_pjrt=JAXLIB)
    pretend(monkeypatch, nvidia_cudnn_cu12="9.1", nvidia_cudnn_cu13="9.2", nvidia_nccl_cu13="2.3")
    (finding,) = check_jax()
    assert finding.status == GREEN
    assert finding.found.endswith("the build for CUDA 13, with cuDNN 9.2 and NCCL 2.3")


@pytest.mark.parametrize("name", ["jax", "jaxlib"])
def test_without_jax_or_jaxlib_the_line_is_red(monkeypatch, name):
    pretend(monkeypatch, **{name: None})
    assert check_jax()[0].status == RED
