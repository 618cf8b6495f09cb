"""Ctrl-C and `--resume`: a run goes on where it was, or says why it will not."""

import shlex
from pathlib import Path

import pytest
from books import check_books, keep_head, open_books, read_steps
from swarm_processes import SHOAL, Swarm, shoal

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_run_that_was_interrupted_goes_on_to_its_end(tmp_path: Path) -> None:
    with Swarm(tmp_path, last_version=8, relays=1, workers=1) as swarm:
        swarm.wait_for_version(3)
        head = keep_head(swarm)
        swarm.interrupt()
        assert swarm.wait_until_over() == 130, swarm.output
        said = swarm.output.strip().splitlines()[-1]
        assert said.startswith("stopped; continue with: shoal run ")
        program, *arguments = shlex.split(said.partition(": ")[2])
        assert (program, arguments) == (
            "shoal",
            [*swarm.command[len(SHOAL) :], "--resume"],
        )
        before, steps = open_books(swarm).events, read_steps(swarm.folder)
        assert steps[-1]["version"] >= 3

        swarm.start("--resume")
        assert swarm.wait_until_over() == 0, swarm.output
        books = check_books(swarm, [head])
        assert books.events[: len(before)] == before, "what was written down before has changed"
        assert read_steps(swarm.folder)[: len(steps)] == steps
        assert not swarm.processes()
        summary = swarm.output[swarm.output.index("run e2e: finished") :]

        # Resuming a finished run prints the same summary and does nothing else.
        swarm.start("--resume")
        assert swarm.wait_until_over() == 0, swarm.output
        again = swarm.output[swarm.output.index("run e2e: finished") :]
        assert lines_about(again, "held-out", "versions", "submissions") == lines_about(
            summary, "held-out", "versions", "submissions"
        )
        trained = [event for event in open_books(swarm).events if event.type == "batch.formed"]
        assert trained == books.of("batch.formed")


def lines_about(summary: str, *subjects: str) -> list[str]:
    return [line for line in summary.splitlines() if line.strip().startswith(subjects)]


def test_resume_refuses_a_changed_or_missing_run(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)  # for its run file; never started
    run = ["run", str(swarm.file), "--dir", str(swarm.folder)]
    nothing = shoal(*run, "--resume")
    assert nothing.returncode == 2
    assert (
        nothing.stderr
        == f"shoal: nothing to resume: {swarm.folder} holds no run; start it without --resume\n"
    )
    assert not swarm.folder.exists()

    swarm.folder.mkdir()
    held = swarm.folder / "run.toml"
    held.write_bytes(swarm.file.read_bytes())
    earlier = shoal(*run)
    assert earlier.returncode == 2
    assert f"{swarm.folder} holds an earlier run" in earlier.stderr
    assert "--resume" in earlier.stderr and "--fresh" in earlier.stderr

    swarm.file.write_text(swarm.file.read_text().replace("samples_per_prompt = 8", "samples_per_prompt = 4"))
    changed = shoal(*run, "--resume")
    assert changed.returncode == 2
    assert f"{swarm.file}: sampling.samples_per_prompt is 4, but" in changed.stderr
    assert "cannot change within a run; put it back" in changed.stderr

    both = shoal(*run, "--resume", "--fresh")
    assert both.returncode == 2
    assert "not allowed with" in both.stderr

    held.rename(swarm.folder / "holiday.jpg")
    not_ours = shoal(*run, "--fresh")
    assert not_ours.returncode == 2
    assert "they are not deleted" in not_ours.stderr
    assert [path.name for path in swarm.folder.iterdir()] == ["holiday.jpg"]
    assert not any("Traceback" in each.stderr for each in (nothing, earlier, changed, both, not_ours))
