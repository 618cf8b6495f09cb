"""From one layout of the tables to the next.

The layout's number stands in the `run` table. `metadata.create_all` makes tables that are missing; what is listed here changes
those that are there, in the transaction that also writes the new number. Alembic would add a second table of versions, an
environment file and a dependency, to run statements that both databases read as they are.
"""

from sqlalchemy import Connection, select, update

from shoal.swarm.coordinator.schema import SCHEMA_VERSION, metadata, run

_NEW_IN_2 = {
    "run": {"terms": "TEXT NOT NULL DEFAULT '{}'", "paused": "BIGINT NOT NULL DEFAULT 0"},
    "nodes": {
        "owner": "VARCHAR",
        "delegated_until_s": "DOUBLE PRECISION",
        "trust_since_s": "DOUBLE PRECISION NOT NULL DEFAULT 0",
        "streak": "BIGINT NOT NULL DEFAULT 0",
        "lapses": "BIGINT NOT NULL DEFAULT 0",
        "lapsed_s": "DOUBLE PRECISION NOT NULL DEFAULT 0",
        "owed": "TEXT NOT NULL DEFAULT ''",
        "outdated_at_s": "DOUBLE PRECISION",
        "live": "BIGINT NOT NULL DEFAULT 0",
        "rows_per_s": "DOUBLE PRECISION NOT NULL DEFAULT 0",
    },
    "leases": {"unit": "VARCHAR NOT NULL DEFAULT ''"},
    "submissions": {
        "checks": "VARCHAR NOT NULL DEFAULT 'full'",
        "draw_epoch": "BIGINT NOT NULL DEFAULT 1",
        "draw_rate": "DOUBLE PRECISION NOT NULL DEFAULT 1",
    },
    "verdicts": {
        "node": "VARCHAR NOT NULL DEFAULT ''",
        "checks": "VARCHAR NOT NULL DEFAULT 'full'",
        "credit": "BIGINT NOT NULL DEFAULT 0",
        "graded": "BIGINT NOT NULL DEFAULT 0",
        "unparseable": "BIGINT NOT NULL DEFAULT 0",
        "revoked_for": "VARCHAR",
    },
}

MIGRATIONS: dict[int, tuple[str, ...]] = {
    2: (
        *(
            f"ALTER TABLE {table} ADD COLUMN {name} {kind}"
            for table, columns in _NEW_IN_2.items()
            for name, kind in columns.items()
        ),
        "UPDATE nodes SET streak = accepted_in_a_row, trust_since_s = enrolled_at_s",
        "ALTER TABLE nodes DROP COLUMN accepted_in_a_row",
        "UPDATE leases SET unit = lease_id",
        "UPDATE verdicts SET credit = output_tokens,"
        " node = (SELECT leases.node FROM leases WHERE leases.lease_id = verdicts.lease_id)",
    ),
    3: ("ALTER TABLE uploads ADD COLUMN asked_at_s DOUBLE PRECISION",),
}
"""What leads to each layout from the one before."""


def migrate(db: Connection) -> None:
    """Bring a database up to date; one that is empty or current is left alone, one from the future is refused later."""
    found = db.execute(select(run.c.schema_version)).scalar_one_or_none()
    if found is None:
        return
    for version in range(found + 1, SCHEMA_VERSION + 1):
        for statement in MIGRATIONS[version]:
            db.exec_driver_sql(statement)
        db.execute(update(run).values(schema_version=version))
    if found < SCHEMA_VERSION:
        for table in metadata.sorted_tables:
            for index in table.indexes:
                index.create(db, checkfirst=True)
