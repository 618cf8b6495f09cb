"""Policy versions: the trainer announces them in order, and the weights of a version never change."""

from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from shoal.swarm.coordinator.context import Coordinator, Transaction, newest_version, spec_now
from shoal.swarm.coordinator.leases import batches, evaluations, lifecycle
from shoal.swarm.coordinator.membership import accounts, relays
from shoal.swarm.coordinator.rules.cumulative_evidence import risen_statistics
from shoal.swarm.coordinator.store.schema import calibrations, policies
from shoal.wire.codes import Rejected
from shoal.wire.manifest import WEIGHTS_FILE, Manifest
from shoal.wire.messages import Announce, Origin, Recorded
from shoal.wire.proof_noise import LaterNoise
from shoal.wire.record import Sealed
from shoal.wire.run_spec import RunSpec


def announce(tx: Transaction, coordinator: Coordinator, told: Announce) -> Recorded:
    """Publishes the next version. Idempotent for a version that is published with the same weights."""
    manifest = told.manifest.open(coordinator.run_key.public)
    _check_manifest(manifest, told, coordinator.spec.run)
    found = find_policy(tx.db, manifest.version)
    if found is not None:
        if found.weights_digest != manifest.weights_digest:
            raise Rejected(
                "request.conflict",
                f"version {manifest.version} is already published with weights {found.weights_digest[:16]}, "
                f"not {manifest.weights_digest[:16]}",
            )
        # A trainer that was restarted may serve the same weights from another address.
        if found.origin_url != told.origin_url:
            tx.write(
                update(policies)
                .where(policies.c.version == manifest.version)
                .values(origin_url=told.origin_url)
            )
        if told.noise is not None and _is_new_calibration(tx, coordinator, told.noise, manifest.version):
            _calibrate(tx, coordinator, told.noise, manifest.version)
        if told.rederived is not None and told.rederived.differing_words:
            tx.record("policy.rederived", version=manifest.version, **told.rederived.model_dump())
        return Recorded(seq=found.seq)
    newest = newest_version(tx.db)
    expected = 0 if newest is None else newest + 1
    if manifest.version != expected:
        raise Rejected(
            "request.conflict", f"versions come in order: {expected} is next, not {manifest.version}"
        )
    if manifest.version > coordinator.spec.last_version:
        raise Rejected("request.conflict", f"version {coordinator.spec.last_version} is the last of this run")
    return Recorded(seq=_publish(tx, coordinator, told, manifest))


def find_policy(db: Connection, version: int) -> Row[Any] | None:
    return db.execute(select(policies).where(policies.c.version == version)).one_or_none()


def get_manifest(db: Connection, version: int | None) -> Sealed[Manifest]:
    """Returns the manifest of one version, or of the newest if `version` is None."""
    wanted = newest_version(db) if version is None else version
    row = None if wanted is None else find_policy(db, wanted)
    if row is None:
        what = "any version" if version is None else f"version {version}"
        raise Rejected("request.not_found", f"the trainer has not published {what} yet")
    return Sealed[Manifest].parse(row.manifest)


def origin(db: Connection) -> Origin:
    url = relays.origin_url(db)
    if not url:
        raise Rejected(
            "request.too_early",
            "the trainer has not published version 0, so there is no origin",
            retry_after_s=1.0,
        )
    return Origin(url=url)


def _is_new_calibration(tx: Transaction, coordinator: Coordinator, later: LaterNoise, version: int) -> bool:
    """Returns whether a calibration for a version that is published already must be recorded: work of it may stand in doubt, also
    after a calibration that was measured with an earlier version."""
    known = [
        (one.from_version, one.measured_version) for one in spec_now(tx.db, coordinator.spec).later_noise
    ]
    told = (later.from_version, later.measured_version)
    return version == newest_version(tx.db) and told > max(known, default=(-1, -1))


def _calibrate(tx: Transaction, coordinator: Coordinator, later: LaterNoise, version: int) -> None:
    """Records a calibration that judges work of `version`, the newest, and of later versions from now on.

    Evidence names the calibration that it was judged by, so audits repeat earlier verdicts with the earlier one.
    """
    spec = spec_now(tx.db, coordinator.spec)
    wrong = ""
    if later.from_version != version:
        wrong = f"is from version {later.from_version} on"
    elif later.measured_version > version:
        wrong = f"was measured with version {later.measured_version}"
    if wrong:
        raise Rejected("request.malformed", f"the calibration {wrong}, the manifest is of {version}")
    try:
        RunSpec.model_validate(spec.model_dump() | {"later_noise": (later.model_dump(),)})
    except ValueError as error:
        raise Rejected(
            "request.malformed", f"the calibration does not fit the run's terms: {error}"
        ) from None
    before = spec.noise_of(version)
    rises = {} if before is None else later.noise.rise_since(before)
    risen = risen_statistics(rises)
    rounded = {name: round(rise, 4) for name, rise in rises.items()}
    tx.record("run.calibrated", **later.model_dump(mode="json"), rises=rounded, risen=list(risen))
    accounts.note_calibration(tx, coordinator, later.measured_version, risen)
    tx.write(insert(calibrations).values(from_version=version, body=later.model_dump_json()))


def _check_manifest(manifest: Manifest, told: Announce, run: str) -> None:
    if manifest.run != run:
        raise Rejected("request.conflict", f"the manifest is of run {manifest.run[:80]!r}, this is {run!r}")
    if WEIGHTS_FILE not in {entry.name for entry in manifest.files}:
        raise Rejected(
            "request.malformed", f"the manifest of version {manifest.version} has no {WEIGHTS_FILE}"
        )
    if told.report is not None and told.report.version != manifest.version:
        raise Rejected(
            "request.malformed",
            f"the report is of version {told.report.version}, the manifest of {manifest.version}",
        )


def _publish(tx: Transaction, coordinator: Coordinator, told: Announce, manifest: Manifest) -> int:
    seq = tx.record(
        "policy.published",
        version=manifest.version,
        weights_digest=manifest.weights_digest,
        manifest_digest=manifest.digest(),
        num_bytes=manifest.payload_bytes,
    )
    tx.write(
        insert(policies).values(
            version=manifest.version,
            weights_digest=manifest.weights_digest,
            manifest=told.manifest.model_dump_json(),
            origin_url=told.origin_url,
            report=told.report.model_dump_json() if told.report else None,
            num_bytes=manifest.payload_bytes,
            published_at_s=tx.now_s,
            seq=seq,
        )
    )
    if told.noise is not None:
        _calibrate(tx, coordinator, told.noise, manifest.version)
    batches.retire_stale(tx, manifest.version, coordinator.spec.max_lag)
    lifecycle.void_stale(tx, coordinator, manifest.version)
    if evaluations.plan_evaluation(tx, coordinator, manifest.version):
        lifecycle.finish_run(tx, coordinator)
    return seq
