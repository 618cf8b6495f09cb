"""When a node asked where to put its file: the page's timeline shows it."""

from alembic import op
from sqlalchemy import Column, Float

revision, down_revision = "3", "2"


def upgrade() -> None:
    op.add_column("uploads", Column("asked_at_s", Float))
