"""The pages of docs/wire that belong to the coordinator: their vectors hold, and no route or event is missing."""

import json
import re
from pathlib import Path

from small_swarm import CONFIG, LOG, SPEC
from starlette.routing import Route

from shoal.swarm.coordinator.context import open_coordinator
from shoal.swarm.coordinator.http.routes import SIGNED_ROUTES
from shoal.swarm.coordinator.http.server import RunApp
from shoal.swarm.coordinator.rules.trust import Trust
from shoal.tasks import make_task
from shoal.wire.codes import CODES
from shoal.wire.keys import Key
from shoal.wire.lease import Lease, Receipt, Verdict
from shoal.wire.ledger import LedgerEvent, LedgerHead, verify_ledger
from shoal.wire.record import Record, Sealed, seal
from shoal.wire.request import Target, sign_request, signature_base, verify_request
from shoal.wire.seeded_draw import lease_seed, problem_seeds

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs" / "wire"
RUN_KEY = Key.from_seed(bytes(range(32)))
NODE_KEY = Key.from_seed(bytes(range(32, 64)))


def block(page: str, name: str) -> str:
    """Returns the fenced block of a page with the title `name`."""
    text = (PAGES / page).read_text(encoding="utf-8")
    match = re.search(rf"^```\w+ {name}\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"{page} has no block {name}"
    return match[1]


def fields(page: str) -> set[str]:
    """Returns the backquoted first cells of table rows."""
    rows = re.findall(r"^\| (`[^|]*) \|", (PAGES / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_lease_vector() -> None:
    sealed = Sealed[Lease].parse(block("lease.md", "lease"))
    lease = sealed.open(RUN_KEY.public)
    assert seal(lease, RUN_KEY) == sealed
    assert lease.digest() == block("lease.md", "lease-digest")
    assert lease.node == NODE_KEY.public
    assert lease.seed == lease_seed(bytes(range(64, 96)), lease.lease_id, lease.node)
    seeds = problem_seeds(lease.seed, run="golden", purpose="train", chunk=0, num_prompts=2)
    assert lease.prompts == tuple(make_task(lease.task).problem("train", seed).prompt for seed in seeds)


def test_the_receipt_vector() -> None:
    sealed = Sealed[Receipt].parse(block("lease.md", "receipt"))
    assert seal(sealed.open(RUN_KEY.public), RUN_KEY) == sealed


def test_the_verdict_vector() -> None:
    verdict = Verdict.parse(block("lease.md", "verdict"))
    assert verdict.canonical().decode() == block("lease.md", "verdict")
    assert verdict.digest() == block("lease.md", "verdict-digest")


def test_the_ledger_vector() -> None:
    events = [LedgerEvent.parse(json.dumps(event)) for event in json.loads(block("ledger.md", "events"))]
    head = Sealed[LedgerHead].parse(block("ledger.md", "head"))
    assert verify_ledger(events, head, RUN_KEY.public) == 3
    assert seal(head.body, RUN_KEY) == head


def test_the_request_vector() -> None:
    asked = json.loads(block("request.md", "request"))
    body, now_s, nonce = asked.pop("body").encode(), asked.pop("now_s"), asked.pop("nonce")
    target = Target(**asked)
    headers = json.loads(block("request.md", "headers"))
    assert sign_request(NODE_KEY, target, body, now_s=now_s, nonce=nonce) == headers
    parameters = headers["Signature-Input"].removeprefix("sig1=")
    base = signature_base(target, headers["Content-Digest"], parameters)
    assert base.decode() == block("request.md", "signature-base")
    signer = verify_request(headers, target, body, now_s=now_s)
    assert (signer.key, signer.nonce) == (NODE_KEY.public, nonce)


def test_every_field_has_its_line() -> None:
    records: tuple[type[Record], ...] = (Lease, Receipt, Verdict)
    for record in records:
        assert set(record.model_fields) <= fields("lease.md"), record.__name__
    assert set(LedgerEvent.model_fields) <= fields("ledger.md")


def test_every_event_has_its_line() -> None:
    """The page lists exactly the events that the code writes into the ledger."""
    written = set(re.findall(r'\.record\(\s*"([a-z]+\.[a-z]+)"', source_of("swarm/coordinator")))
    written |= {f"node.{trust.value}" for trust in Trust} | {"node.current", "node.outdated"}
    written |= {f"admin.{order}" for order in ("quarantine", "ban", "restore", "resume")}
    assert {name for name in fields("ledger.md") if "." in name} == written


def test_every_route_and_code_has_its_line(tmp_path: Path) -> None:
    coordinator = open_coordinator(CONFIG, SPEC, tmp_path, log=LOG)
    routes = {
        f"{method} {route.path}"
        for route in RunApp(coordinator).public.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    } | {f"{route.method} {route.path}" for route in SIGNED_ROUTES}
    routes.add("PUT /v1/objects/{name}")  # receiving.py's
    coordinator.close()
    page = (PAGES / "api.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`((?:GET|POST|PUT) /[^`]*)`", page)) == routes
    listed = {
        code: int(status)
        for status, row in re.findall(r"^\| (\d{3}) \| (.*) \|$", page, re.MULTILINE)
        for code in re.findall(r"`(request\.[a-z_]+)`", row)
    }
    assert listed == {code: CODES[code].status for code in listed}
    assert listed.keys() >= set(
        re.findall(r'"(request\.[a-z_]+)"', source_of("swarm/coordinator", "wire", "net"))
    )


def source_of(*rooms: str) -> str:
    """Returns the source that a request can reach, without the table of codes, which also has those of relays."""
    paths = [path for room in rooms for path in (ROOT / "src" / "shoal" / room).rglob("*.py")]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths if path.name != "codes.py")
