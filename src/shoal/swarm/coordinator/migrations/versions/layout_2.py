"""Trust with streaks and lapses, owners, drawn checks, credit that can be revoked. Its new tables are made by create_all."""

from typing import Any

from alembic import op
from sqlalchemy import BigInteger, Column, Float, String, Text

revision, down_revision = "2", "1"


def _number(name: str, default: str = "0") -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default=default)


def _measure(name: str, default: str = "0") -> Column[float]:
    return Column(name, Float, nullable=False, server_default=default)


def _words(name: str, default: str) -> Column[str]:
    return Column(name, String, nullable=False, server_default=default)


def _new() -> dict[str, list[Column[Any]]]:
    return {
        "run": [Column("terms", Text, nullable=False, server_default="{}"), _number("paused")],
        "nodes": [
            Column("owner", String),
            Column("delegated_until_s", Float),
            _measure("trust_since_s"),
            _number("streak"),
            _number("lapses"),
            _measure("lapsed_s"),
            Column("owed", Text, nullable=False, server_default=""),
            Column("outdated_at_s", Float),
            _number("live"),
            _measure("rows_per_s"),
        ],
        "leases": [_words("unit", "")],
        "submissions": [_words("checks", "full"), _number("draw_epoch", "1"), _measure("draw_rate", "1")],
        "verdicts": [
            _words("node", ""),
            _words("checks", "full"),
            _number("credit"),
            _number("graded"),
            _number("unparseable"),
            Column("revoked_for", String),
        ],
    }


def upgrade() -> None:
    for table, columns in _new().items():
        for column in columns:
            op.add_column(table, column)
    op.execute("UPDATE nodes SET streak = accepted_in_a_row, trust_since_s = enrolled_at_s")
    op.drop_column("nodes", "accepted_in_a_row")
    op.execute("UPDATE leases SET unit = lease_id")
    op.execute(
        "UPDATE verdicts SET credit = output_tokens,"
        " node = (SELECT leases.node FROM leases WHERE leases.lease_id = verdicts.lease_id)"
    )
