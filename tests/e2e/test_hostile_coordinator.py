"""An operator publishes a model with code and with a chat template that never ends, and a volunteer joins: no code runs, and the worker
stops and says why."""

from pathlib import Path

import httpx2
import pytest
from model_folders import write_model
from roles import Roles, free_port, run_file
from swarm_processes import read_ledger

from planted_code import plant_code
from shoal.cli.run.supervise import EXIT_USAGE
from shoal.wire.messages import Stats

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

HANGS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_hangs_stops_the_worker_with_the_reason(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    write_model(tmp_path / "model", template=HANGS)
    plant_code(tmp_path / "model", mark)
    path = run_file(
        tmp_path / "run.toml", "hostile", model=str(tmp_path / "model"), supervised_steps=0, row_tokens=192
    )
    # These prompts are turns for the chat template.
    path.write_text(path.read_text().replace("partial = 0.5", 'style = "chat"'))
    url = f"http://127.0.0.1:{(port := free_port())}"
    with Roles(tmp_path) as roles:
        roles.start("coordinator", "coordinator", path, "--port", port)
        roles.wait_until_up(url)
        roles.start_crew(url, path, tmp_path / "coordinator" / "keys")

        def stats() -> Stats:
            return Stats.parse(httpx2.get(f"{url}/v1/stats").raise_for_status().content)

        roles.wait_for("a relay with version 0", lambda: stats().relays and stats().newest_version == 0)
        worker = roles.start("worker", "join", url, "--yes", "--threads", "1")
        assert worker.wait(150) == EXIT_USAGE, roles.log("worker")
        assert "the chat template cannot be rendered: it took more than 0.5 s" in roles.log("worker")
        (node,) = stats().nodes
        assert (node.trust, node.rejected) == ("probation", 0)
        kinds = [event.type for event in read_ledger(url)]
        assert kinds.count("lease.void") == 1 and "submission.received" not in kinds, "it gave its lease back"
    assert not mark.exists(), "code of the model's folder ran"
