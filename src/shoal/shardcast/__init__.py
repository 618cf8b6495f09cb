"""SHARDCAST: distributes a folder to many machines, through a tree of relays that need not be trusted.

    publish(folder, run=..., version=..., key=...)             sign a version (publisher)
    VersionStore + RelayServer                                 serve it (origin)
    run_relay(RelayConfig(...), ...)                           mirror and serve it (relay)
    fetch_manifest(...), fetch_newer(...), fetch_version(...)  download and verify it (client)

docs/shardcast.md shows all four in one example. No torch here.
"""

from shoal.shardcast.client.fetch import fetch_manifest, fetch_newer, fetch_version
from shoal.shardcast.client.relay_choice import ProgressReceiver, RelayChoice
from shoal.shardcast.manifest_files import prune_versions
from shoal.shardcast.publish import SHARD_BYTES, SNAPSHOT_EVERY, Base, publish
from shoal.shardcast.relay.mirror import Mirror
from shoal.shardcast.relay.relay_app import RelayApp, RelayServer
from shoal.shardcast.relay.relay_process import Relay, RelayConfig, run_relay
from shoal.shardcast.store import KEEP_VERSIONS, VersionStore

__all__ = [
    "KEEP_VERSIONS",
    "SHARD_BYTES",
    "SNAPSHOT_EVERY",
    "Base",
    "Mirror",
    "ProgressReceiver",
    "Relay",
    "RelayApp",
    "RelayChoice",
    "RelayConfig",
    "RelayServer",
    "VersionStore",
    "fetch_manifest",
    "fetch_newer",
    "fetch_version",
    "prune_versions",
    "publish",
    "run_relay",
]
