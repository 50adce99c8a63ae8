"""`ls` and `verify` show the steps of a run in several places, as its checkpointer knows them."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from _corruption import flip
from command_line import json_of, run, succeed

import ptsave
from ptsave.sources.locations import LocalFolder
from ptsave.sources.ranges import open_source
from ptsave.training import manifests
from ptsave.training.manifests import Manifest, digest_of, manifest_of

SLOW = "memory://run"


@pytest.fixture(autouse=True)
def _empty_memory() -> None:
    fsspec.filesystem("memory").store.clear()


def save(slow: str | Path, fast: Path, *, steps: int = 4, **options: Any) -> int | None:
    """Save steps, each second one also to the slow place; return the protected step."""
    run = ptsave.AsyncCheckpointer(slow, 9, local=fast, every={"remote": 2}, **options)
    with run:
        for step in range(1, steps + 1):
            run.save(step, model=torch.nn.Linear(2, 2), step=step)
        run.wait()
        return run.protected()


def put(step: int, rank: int, *places: Path) -> None:
    """Put the part of one of two ranks into the directories of hosts, or the slow place."""
    names = [str(place) if place.name == "slow" else place.name for place in places]
    for place, its_name in zip(places, names, strict=True):
        name = f"step-{step:08}.{'0' * 16}-0.rank-{rank}-of-2.pt"
        ptsave.save_checkpoint(place / name, weights=torch.full((9,), float(rank)))
        with closing(open_source(place / name)) as source:
            manifest = Manifest(name, source.nbytes, digest_of(source), "", tuple(names))
        manifest.at(its_name).write(LocalFolder(str(place)), fsync=False)


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path, Path]:
    made = tmp_path / "slow", tmp_path / "host-a", tmp_path / "host-b"
    for each in made:
        each.mkdir()
    return made


def is_whole(step: dict[str, Any]) -> bool:
    return not (step["absent"] or step["defects"])


def steps(*arguments: object, code: int = 0) -> dict[int, dict[str, Any]]:
    """Return the JSON objects of `ls` by step; each step has one."""
    found = json_of("ls", *arguments, code=code)["steps"]
    assert len({each["step"] for each in found}) == len(found)
    return {each["step"]: each for each in found}


@pytest.mark.parametrize("slow", [SLOW, f"{SLOW}/", "slow"])
def test_steps_by_place(slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    protected = save(slow, tmp_path / "fast")
    found = steps("fast", slow)
    both = {"fast": 1, slow: 1}
    assert [each["directories"] for each in found.values()] == [{"fast": 1}, both] * 2
    assert all(is_whole(each) and each["elsewhere"] == [] for each in found.values())
    assert max(step for step, each in found.items() if each["protected"]) == protected == 4
    assert not found[3]["protected"]
    assert found[1]["nbytes"] == os.stat("fast/step-00000001.pt").st_size
    first, *_, last = succeed("ls", "fast", slow).stdout.splitlines()
    assert first.startswith("step 1  fast 1/1  ")
    assert first.endswith("whole; not protected")
    assert last.endswith("whole; protected")


def test_a_place_that_is_not_given_is_in_brackets(tmp_path: Path) -> None:
    save(SLOW, tmp_path)
    assert [each["elsewhere"] for each in steps(tmp_path).values()] == [[], [SLOW]] * 2
    assert f"{tmp_path} 1/1 [{SLOW}]" in succeed("ls", tmp_path).stdout
    fsspec.filesystem("memory").rm("/run/step-00000004.pt")
    found = steps(tmp_path, SLOW)  # looked at, so the manifest in the other place does not count
    assert (found[4]["elsewhere"], found[4]["protected"]) == ([], False)
    assert found[2]["protected"]


def test_parts_of_hosts(places: tuple[Path, Path, Path]) -> None:
    slow, a, b = places
    put(2, 0, a, slow)
    put(2, 1, b, slow)
    (step,) = steps(slow, a, b).values()
    assert step["directories"] == {str(slow): 2, str(a): 1, str(b): 1}
    assert (step["parts"], is_whole(step), step["protected"]) == (2, True, True)
    files = [*slow.glob("*.pt")]
    assert step["nbytes"] == sum(file.stat().st_size for file in files)
    for file in slow.glob("*rank-1*"):
        file.unlink()
    (step,) = steps(slow, a).values()
    assert step["absent"] == "no part of rank 1"
    assert not step["protected"]
    (step,) = steps(slow, a, b).values()
    assert (is_whole(step), step["protected"]) == (True, False)


def test_copies_of_peers_protect(places: tuple[Path, Path, Path]) -> None:
    slow, a, b = places
    put(1, 0, a)
    put(1, 1, b)
    put(3, 0, a, b)
    put(3, 1, b, a)
    found = steps(slow, a, b)
    assert [each["protected"] for each in found.values()] == [False, True]
    assert found[3]["directories"] == {str(a): 2, str(b): 2}
    assert steps(a, a)[3] == steps(a)[3]
    assert (steps(a)[3]["elsewhere"], steps(a)[3]["protected"]) == (["host-b"], True)
    assert (is_whole(steps(a)[1]), steps(a)[1]["protected"]) == (False, False)
    for file in b.glob("step-00000003*.pt"):
        file.unlink()
    found = steps(a, b)  # the manifests in `a` name `b`, which has lost the copies
    assert (is_whole(found[3]), found[3]["protected"]) == (True, False)


def test_reasons(tmp_path: Path) -> None:
    save(SLOW, tmp_path, steps=5)
    os.truncate(tmp_path / "step-00000001.pt", 7)
    nbytes = os.stat(tmp_path / "step-00000003.pt").st_size
    (tmp_path / "step-00000002.pt.json").unlink()
    (tmp_path / "step-00000004.pt.json").write_text("[" * 100_000)
    (tmp_path / "step-00000005.pt").unlink()  # its manifest is left
    found = steps(tmp_path)
    assert found[1]["defects"] == [f"step-00000001.pt has 7 bytes, not {nbytes:,}"]
    assert found[2]["defects"] == ["step-00000002.pt.json is missing"]
    assert found[4]["defects"] == ["step-00000004.pt.json is damaged"]
    assert [step for step, each in found.items() if is_whole(each)] == [3]
    assert 5 not in found
    assert not any(each["protected"] for each in found.values())


def test_manifests_without_files(tmp_path: Path) -> None:
    (tmp_path / "step-00000001.pt.json").write_text("{}")
    assert succeed("ls", tmp_path).stdout == "\n"
    assert json_of("ls", tmp_path) == {"steps": []}


def test_a_step_that_was_saved_twice(tmp_path: Path) -> None:
    save(SLOW, tmp_path / "a", steps=2)
    save(f"{SLOW}2", tmp_path / "b", steps=2)
    lines = succeed("ls", tmp_path / "a", tmp_path / "b").stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["1", "1", "2", "2"]
    assert len({line.split()[2] for line in lines}) == 4


def test_names_and_manifests_of_an_attacker(tmp_path: Path) -> None:
    save(SLOW, tmp_path, steps=1)
    file = (tmp_path / "step-00000001.pt").read_bytes()
    huge = f"step-00000009.{'f' * 16}-0.rank-7-of-999999999.pt"
    (tmp_path / huge).write_bytes(file)
    (tmp_path / f"step-00000009.{'f' * 16}-0.rank-7-of-3.pt").write_bytes(file)
    fields = {
        "file": huge,
        "nbytes": len(file),
        "digest": "0" * 32,
        "save": "",
        "places": ["\x1b[31m"],
    }
    (tmp_path / f"{huge}.json").write_text(json.dumps(fields))
    shown = steps(tmp_path)
    assert shown[9]["parts"] == 999999999
    assert shown[9]["absent"] == "no part of rank 0, 1, 2 and 999,999,995 more"
    assert "\x1b" not in succeed("ls", tmp_path).stdout
    for wrong in (
        {"nbytes": -1},
        {"nbytes": True},
        {"places": [1]},
        {"digest": "x"},
        {"file": "y"},
    ):
        (tmp_path / f"{huge}.json").write_text(json.dumps({**fields, **wrong}))
        assert f"{huge}.json is damaged" in steps(tmp_path)[9]["defects"]
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert f"{huge}.json is damaged" in result.stdout


def test_a_place_that_cannot_be_listed(tmp_path: Path) -> None:
    save(SLOW, tmp_path)
    result = run("ls", tmp_path, "memory://gone")
    assert result.exit_code == 2
    assert result.stderr == "ptsave: memory://gone: No such file or directory\n"
    assert len(result.stdout.splitlines()) == 4


def test_a_file_that_the_run_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(SLOW, tmp_path)
    copies_in = manifests.copies_in

    def list_then_remove(*arguments: Any) -> Any:
        found = [*copies_in(*arguments)]
        (tmp_path / "step-00000001.pt").unlink()
        return found

    monkeypatch.setattr("ptsave.inspection.runs.copies_in", list_then_remove)
    assert [*steps(tmp_path)] == [2, 3, 4]


def test_entries_are_listed_on_request(tmp_path: Path) -> None:
    save(SLOW, tmp_path / "fast", steps=2)
    for arguments in (["step"], ["--depth", 1], ["--sort", "size"], ["-l"], ["--stats"]):
        assert "step 1" not in succeed("ls", tmp_path / "fast", *arguments).stdout
    with ptsave.AsyncCheckpointer(tmp_path / "plain") as plain:
        plain.save(1, epoch=1)
    assert "epoch" in succeed("ls", tmp_path / "plain").stdout
    places = tmp_path / "plain", tmp_path / "fast"  # one of them has manifests
    assert "step-00000001.pt.json is missing" in succeed("ls", *places).stdout


def test_storage_options_are_for_the_urls(tmp_path: Path) -> None:
    save(SLOW, tmp_path)
    options = ["--storage-options", '{"skip_instance_cache": true}']
    for command in ("ls", "verify"):
        succeed(command, tmp_path, SLOW, *options)
        assert "only for URLs" in run(command, tmp_path, *options).output


# ------------------------------------------------------------------------------------------- verify


def test_verify_compares_digests(tmp_path: Path) -> None:
    save(SLOW, tmp_path)
    assert json_of("verify", tmp_path, SLOW)["whole"]
    path = tmp_path / "step-00000002.pt"
    flip(path, 61)  # padding, which has no checksum
    assert run("verify", path).exit_code == 0
    result = run("verify", tmp_path, SLOW)
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if "XXH3-128" in line]
    manifest = manifest_of(LocalFolder(str(tmp_path)), path.name)
    assert manifest is not None
    assert str(manifest.digest) in line
    assert result.stdout.count("DAMAGED") == 1
    found = json_of("verify", tmp_path, SLOW, code=1)
    states = [each["state"] for each in found["arguments"][0]["files"]]
    assert states == ["whole", "damaged", "whole", "whole"]


def test_verify_compares_digests_at_a_url(tmp_path: Path) -> None:
    save(SLOW, tmp_path)
    files = fsspec.filesystem("memory").store
    (data,) = [each for name, each in files.items() if name.endswith("4.pt")]
    data.seek(61)
    data.write(b"XYZ")
    result = run("verify", SLOW)
    assert result.exit_code == 1
    assert "step-00000004.pt: DAMAGED" in result.stdout
    assert "step-00000002.pt: whole" in result.stdout


def test_verify_names_files_without_manifest(tmp_path: Path) -> None:
    save(SLOW, tmp_path)
    (tmp_path / "step-00000003.pt.json").unlink()
    result = succeed("verify", tmp_path)
    assert result.stderr == (
        f"ptsave: {tmp_path}/step-00000003.pt: there is no digest to compare, because the file has "
        "no manifest\n"
    )
    assert "not looked at" not in result.stdout
    (found,) = json_of("verify", tmp_path)["arguments"]
    assert [len(each["remarks"]) for each in found["files"]] == [0, 0, 1, 0]


def test_verify_a_host_of_several(places: tuple[Path, Path, Path]) -> None:
    slow, a, b = places
    put(2, 0, a, slow)
    put(2, 1, b, slow)
    assert "step 2: no part of rank 1" in succeed("verify", a).stderr
    assert "no part" not in succeed("verify", a, b).output
    assert "no part" not in succeed("verify", slow).output
    for manifest in a.glob("*.json"):
        manifest.unlink()
    assert "other parts of this step are missing" in run("verify", a).stdout  # as without tiers


def test_a_manifest_names_its_own_place_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PTSAVE_FAILURE_DOMAIN", "a")
    save(tmp_path / "slow", tmp_path / "fast", steps=2)
    name = "step-00000002.pt"
    both = "a", str(tmp_path / "slow")
    found: list[Manifest | None] = [
        manifest_of(LocalFolder(str(tmp_path / place)), name) for place in ("fast", "slow")
    ]
    assert [each and each.places for each in found] == [both, both[::-1]]
