"""What Alembic runs to find its database: the connection of the transaction that opens it."""

from alembic import context

from shoal.swarm.coordinator.store.schema import metadata

# Its own transaction would be a second one: this is inside ours.
context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
