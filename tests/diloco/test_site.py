"""Tests of a whole site on the tiny model: order of the data, rounds, checkpoints, resuming."""

import importlib.util
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_swarm import in_threads, make_peer

from shoal.cli.commands.diloco import check_peer_join, describe_peers, reach_of
from shoal.cli.main import parse, run_command
from shoal.cli.run.supervise import lock_folder
from shoal.cli.ui.plot import plot_losses, read_events
from shoal.diloco import LocalHub
from shoal.diloco.averaging.peer_messages import Card
from shoal.diloco.site.diloco_file import DilocoFile, InnerSection, load_diloco_file
from shoal.diloco.site.language import Samples, read_corpus
from shoal.diloco.site.site import Site, SiteCheckpoints, SiteProgress, inner_groups, learning_rate
from shoal.model.load_model import load_decoder
from shoal.net.waiting import Stopped
from shoal.telemetry import Log, Metrics
from shoal.trainer.config import DilocoConfig

TEXT = "the sea is wide and the fish are many; " * 200


def small_file(folder: Path, *, steps: int = 8, engine: str = "local") -> DilocoFile:
    (folder / "text.txt").write_text(TEXT)
    path = folder / "small.toml"
    path.write_text(
        f"""
[run]
name = "small"
model = "tiny"
steps = {steps}
engine = "{engine}"
[data]
files = ["{folder}/*.txt"]
sequence = 16
[inner]
lr = 3e-3
warmup_steps = 2
batch = 4
micro_batch = 2
[rounds]
inner_steps = 4
codec = "int8"
deadline_s = 60.0
"""
    )
    return load_diloco_file(path)


def make_site(file: DilocoFile, folder: Path, hub: LocalHub, peer: str) -> Site:
    averager = make_peer(hub, codec=file.rounds.codec, min_peers=file.rounds.min_peers)
    return Site(file, averager, folder=folder / peer, device="cpu", peer=peer, stop=threading.Event())


def test_two_sites_train_to_one_state(tmp_path: Path) -> None:
    file = small_file(tmp_path)
    file = file.model_copy(update={"rounds": file.rounds.model_copy(update={"min_peers": 2})})
    hub = LocalHub()
    sites = [make_site(file, tmp_path, hub, peer) for peer in ("one", "two")]
    for site in sites:
        site.optimizer.join(deadline_s=10)
    progress = in_threads([lambda site=site: site.train(join_s=10) for site in sites])  # type: ignore[misc]
    assert sites[0].optimizer.outer_state.digest() == sites[1].optimizer.outer_state.digest()
    assert sites[0].optimizer.outer_state.work == 64.0
    assert progress[0].validation == progress[1].validation < 4.6
    in_threads([site.close for site in sites])
    assert plot_losses(tmp_path / "one" / "metrics.jsonl", tmp_path / "loss.png", "loss")
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_site_continues_from_its_checkpoint(tmp_path: Path) -> None:
    whole = make_site(small_file(tmp_path), tmp_path, LocalHub(), "whole")
    whole.train(join_s=10)
    half = make_site(small_file(tmp_path, steps=4), tmp_path, LocalHub(), "half")
    half.train(join_s=10)
    rest = make_site(small_file(tmp_path, steps=8), tmp_path, LocalHub(), "half")
    rest.train(join_s=10)
    assert rest.optimizer.steps == 8 and rest.optimizer.outer_state.round == 2
    assert rest._samples.position == whole._samples.position == 32
    in_threads([site.close for site in (whole, half, rest)])


class Crash(Exception):
    pass


def _crash(report: object) -> None:
    raise Crash


@pytest.mark.parametrize("merged", [True, False])
def test_work_counts_once_however_the_site_ends(tmp_path: Path, merged: bool) -> None:
    """A site is stopped and restarted. If `merged`, it is also killed between a round and its next checkpoint."""
    file = small_file(tmp_path, steps=8)
    file = file.model_copy(update={"rounds": file.rounds.model_copy(update={"min_peers": 1 + merged})})
    hub = LocalHub()
    other = make_site(file, tmp_path, hub, "other")
    other.optimizer.join(deadline_s=10)
    first = make_site(file, tmp_path, hub, "one")
    first.on_progress = lambda progress: first._stop.set() if progress.steps == 2 else None
    with pytest.raises(Stopped):
        first.train(join_s=10)
    first.close()
    if merged:
        again = make_site(file, tmp_path, hub, "one")
        again._resume()
        assert again.optimizer.keep_local_work, "no peer was offered it yet"
        again._report_round = _crash  # type: ignore[method-assign]
        crashed, _ = in_threads([lambda: _train_until_crash(again), lambda: _steps(other, 4)])
        assert crashed
        again.close()
    else:
        _steps(other, 4)
    last = make_site(file, tmp_path, hub, "one")
    last._resume()
    assert last.optimizer.phase == 2 and last.optimizer.keep_local_work is not merged
    assert last.optimizer.join(deadline_s=10), "the swarm has taken a round meanwhile"
    moved = bool(np.any(last.optimizer.pseudo_gradient()))
    assert moved is not merged, "merged: no work is left to contribute; not merged: it is kept"
    in_threads([site.close for site in (other, last)])


def _train_until_crash(site: Site) -> bool:
    try:
        site.train(join_s=10)
    except Crash:
        return True
    return False


def _steps(site: Site, num: int) -> bool:
    for _ in range(num):
        site._step()
    return False


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_site_stopped_while_waiting_for_a_round_saves_its_work(tmp_path: Path, overlap_steps: int) -> None:
    """Ctrl-C before there is a group: no peer was offered anything, so all work is kept."""
    file = small_file(tmp_path, steps=8)
    rounds = {"min_peers": 2, "overlap_steps": overlap_steps}
    file = file.model_copy(update={"rounds": file.rounds.model_copy(update=rounds)})
    hub = LocalHub()
    site = make_site(file, tmp_path, hub, "one")
    begin = site.optimizer.averager.begin

    def begin_and_stop(*ready: Any, **more: Any) -> Any:
        threading.Timer(0.5, site._stop.set).start()
        return begin(*ready, **more)

    site.optimizer.averager._stop = site._stop  # type: ignore[attr-defined]
    site.optimizer.averager.begin = begin_and_stop  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        site.train(join_s=10)
    site.close()
    again = make_site(file, tmp_path, hub, "one")
    again._resume()
    taken = again.optimizer.steps
    assert 4 <= taken <= 4 + overlap_steps, "one round's steps, and those that overlap it"
    assert again.optimizer.phase == taken and again.optimizer._samples == 4 * taken, "the round is still due"
    assert again.optimizer.keep_local_work and np.any(again.optimizer.pseudo_gradient())
    again.close()


def test_weights_that_are_not_finite_are_not_sent(tmp_path: Path) -> None:
    file = small_file(tmp_path)
    site = make_site(file, tmp_path, LocalHub(), "one")

    def break_a_weight(progress: SiteProgress) -> None:
        next(site.model.parameters()).data[0].fill_(float("nan"))

    site.on_progress = break_a_weight
    with pytest.raises(ValueError, match="not finite after 4 inner steps"):
        site.train(join_s=10)
    assert site.optimizer.outer_state.round == 0 and site._checkpoints.newest() is None
    site.close()


@pytest.mark.parametrize(
    ("section", "other", "reason"),
    [
        ("rounds", {"fragments": 2}, "another number of fragments"),
        ("run", {"name": "other"}, "belongs to the run 'small', the file to 'other'"),
    ],
)
def test_checkpoint_of_another_run_is_refused(
    tmp_path: Path, section: str, other: dict[str, Any], reason: str
) -> None:
    file = small_file(tmp_path, steps=4)
    site = make_site(file, tmp_path, LocalHub(), "one")
    site.train(join_s=10)
    site.close()
    changed = getattr(file, section).model_copy(update=other)
    again = make_site(file.model_copy(update={section: changed}), tmp_path, LocalHub(), "one")
    with pytest.raises(ValueError, match=reason):
        again.train(join_s=10)
    again.close()


def test_second_process_waits_for_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_file(tmp_path)
    folder, stop = tmp_path / "site", threading.Event()
    folder.mkdir()
    where = ["diloco", "train", str(tmp_path / "small.toml"), "--dir", str(folder)]
    with lock_folder(folder, stop):
        threading.Timer(0.5, stop.set).start()
        assert run_command(parse(where), stop) == 130
    assert "waiting for another `shoal`" in capsys.readouterr().err and not any(folder.iterdir())


def test_truncated_metrics_line_is_skipped_in_the_plot(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step", "step": 10, "loss": 2.0}\n{"event": "st')
    metrics = Metrics(path)
    metrics.write("step", step=20, loss=1.0)
    metrics.close()
    assert [event["step"] for event in read_events(path)] == [10, 20]
    assert plot_losses(path, tmp_path / "loss.png", "loss")


def test_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    kept = SiteCheckpoints(tmp_path, log=Log("test"))
    kept.save(1, {"at": 1})
    newest = kept.save(2, {"at": 2})
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    assert kept.newest() == {"at": 1}


def test_what_a_killed_site_left_half_written_is_deleted(tmp_path: Path) -> None:
    kept = SiteCheckpoints(tmp_path, log=Log("test"))
    (tmp_path / ".complete.tmp.4711.0123abcd.partial").write_bytes(bytes(1000))
    newest = kept.save(1, {"at": 1})
    assert list(tmp_path.iterdir()) == [newest]


def test_samples_are_seen_once_per_epoch_in_the_peers_own_order_and_resumable() -> None:
    tokens = np.arange(1 + 50 * 8, dtype=np.uint32)
    samples = Samples(tokens, sequence=8, peer="a", seed=0)
    epoch = samples.take(50)
    assert sorted(epoch[:, 0].tolist()) == list(range(0, 400, 8)) and epoch.shape == (50, 9)
    assert not np.array_equal(epoch, Samples(tokens, sequence=8, peer="b", seed=0).take(50))
    again = Samples(tokens, sequence=8, peer="a", seed=0)
    again.position = 20
    assert np.array_equal(again.take(30), epoch[20:])


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    samples = Samples(np.arange(1 + 50 * 8, dtype=np.uint32), sequence=8, peer="a", seed=0, vocab_size=300)
    with pytest.raises(ValueError, match=r"the token id \d+, but the model's vocabulary has 300 entries"):
        samples.take(50)


def test_token_files_are_read_unchanged(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.arange(10, dtype=np.uint16))
    (tmp_path / "two.txt").write_text("ab")

    def encode(text: str) -> list[int]:
        return [ord(char) for char in text]

    assert list(read_corpus([str(tmp_path / "one.npy")], encode, tmp_path / "c")) == list(range(10))
    both = read_corpus([str(tmp_path / "*")], encode, tmp_path / "c")
    assert list(both) == [*range(10), 97, 98]
    with pytest.raises(ValueError, match="no file matches"):
        read_corpus([str(tmp_path / "none")], encode, tmp_path / "c")


def test_file_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(
        '[run]\nname = "x"\nmodel = "tiny"\nsteps = 1\n[data]\nfiles = ["a"]\n[rounds]\ninner = 3\n'
    )
    with pytest.raises(ValueError, match=r"rounds\.inner"):
        load_diloco_file(path)
    with pytest.raises(ValueError, match="no file at"):
        load_diloco_file(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[2].glob("runs/diloco/*.toml")), ids=lambda p: p.name
)
def test_shipped_run_files_are_valid(path: Path) -> None:
    assert load_diloco_file(path).run.steps > 0


def test_every_key_of_the_file_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "diloco.md").read_text()
    for section in DilocoFile.model_fields.values():
        for key in section.annotation.model_fields:  # type: ignore[union-attr]
            assert f"`{key}`" in page, f"docs/diloco.md does not name {key}"


def test_command_trains_with_the_local_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_file(tmp_path)
    where = ["diloco", "train", str(tmp_path / "small.toml"), "--dir", str(tmp_path / "site")]
    assert run_command(parse(where), threading.Event()) == 0
    assert "run small: 8 steps, validation loss" in capsys.readouterr().out
    assert (tmp_path / "site" / "loss.png").exists()
    made, kept = (
        load_decoder(tmp_path / "site" / "model"),
        SiteCheckpoints(tmp_path / "site" / "checkpoints", log=Log("test")).newest(),
    )
    assert kept is not None
    for name, value in made.named_parameters():
        assert torch.equal(value, kept["model"][name].bfloat16().float()), name
    stopped = threading.Event()
    stopped.set()
    again = where[:-1] + [str(tmp_path / "other")]
    assert run_command(parse(again), stopped) == 130


def test_missing_package_error_names_its_extra(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("hivemind"):
        pytest.skip("it is installed")
    small_file(tmp_path, engine="hivemind")
    where = ["diloco", "train", str(tmp_path / "small.toml"), "--dir", str(tmp_path / "site")]
    assert run_command(parse(where), threading.Event()) == 2
    assert "shoal-rl[hivemind]" in capsys.readouterr().err


def test_learning_rate_rises_and_falls() -> None:
    assert learning_rate(1.0, 0, 10, 100) == pytest.approx(0.1)
    assert learning_rate(1.0, 10, 10, 100) == pytest.approx(1.0)
    assert learning_rate(1.0, 100, 10, 100) == pytest.approx(0.1)
    assert learning_rate(1.0, 55, 10, 100, final_share=0.0) == pytest.approx(0.5)
    assert learning_rate(1.0, 100, 10, 100, final_share=0.0) == pytest.approx(0.0)


def test_weight_decay_of_norms_is_an_option() -> None:
    assert InnerSection().decay_norms is False
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    for decay_norms in (False, True):
        inner = InnerSection(decay_norms=decay_norms)
        groups = inner_groups(model, inner)
        assert [len(group["params"]) for group in groups] == [1, 3]
        assert [group["weight_decay"] for group in groups] == [0.1, 0.1 if decay_norms else 0.0]


@pytest.mark.parametrize(
    ("name", "inner_steps", "sites", "batch"),
    [("opendiloco-150m", 500, 8, 512), ("opendiloco-1b", 125, 4, 2048)],
)
def test_opendiloco_run_files_have_the_papers_values(
    name: str, inner_steps: int, sites: int, batch: int
) -> None:
    file = load_diloco_file(Path(__file__).parents[2] / "runs" / "diloco" / f"{name}.toml")
    inner = file.inner
    assert (file.run.steps, file.rounds.inner_steps, file.data.sequence) == (88_000, inner_steps, 1024)
    assert (inner.lr, inner.warmup_steps, inner.final_lr_share) == (4e-4, 1000, 0.0)
    assert (inner.weight_decay, inner.decay_norms) == (0.1, True)
    assert (file.rounds.min_peers, inner.batch, file.rounds.codec) == (sites, batch, "fp16")
    assert (file.outer.lr, file.outer.momentum, file.run.steps % inner_steps) == (0.7, 0.9, 0)


def test_malformed_card_in_the_directory_is_skipped() -> None:
    assert describe_peers({"a": b"noise"}) == []


def test_a_name_in_the_directory_does_not_control_the_terminal() -> None:
    """Every peer writes into the directory, under any name."""
    card = Card(peer="a", reachable=True, standing=None, phase=0, in_round=False)
    (line,) = describe_peers({"\x1b[2J\x07": card.model_dump_json().encode()})
    assert line.isprintable() and line.endswith("no state yet")


@pytest.mark.parametrize(
    ("address", "config", "words"),
    [
        ("/ip4/1.2.3.4/tcp/5/p2p/Qm", None, r"no \[trainer\.diloco\]"),
        ("http://10.0.0.1:8710", DilocoConfig(), "is not the address of a peer"),
    ],
)
def test_invalid_peer_join_address_is_refused(address: str, config: DilocoConfig | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_peer_join([address], config)
    check_peer_join([], config)
    check_peer_join(["http://10.0.0.1:8710"], DilocoConfig(engine="torchft"))


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("/ip4/127.0.0.1/tcp/8710/p2p/Qm", "from this machine"),
        ("/ip4/192.168.1.7/tcp/8710/p2p/Qm", "from this network"),
        ("/ip6/2a00:1450::5/tcp/8710/p2p/Qm", "from anywhere"),
        ("/dns4/a.example/tcp/8710/p2p/Qm", "from where this name is known"),
    ],
)
def test_an_address_says_from_where_it_can_be_joined(address: str, words: str) -> None:
    assert reach_of(address) == words
