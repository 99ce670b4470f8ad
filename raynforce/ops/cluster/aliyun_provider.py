"""Ray's node provider for Alibaba Cloud, with each node type on the market that its `SpotStrategy` names.

Ray's own ignores what a node type says: it asks for spot instances always, for the head too.
"""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import Any

from ray.autoscaler._private.aliyun.node_provider import AliyunNodeProvider


class AliyunProvider(AliyunNodeProvider):
    _one_by_one = Lock()

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> Any:
        client: Any = self.acs
        with self._one_by_one:
            ask = client.run_instances
            client.run_instances = partial(ask, spot_strategy=node_config.get("SpotStrategy", "NoSpot"))
            try:
                return super().create_node(node_config, tags, count)
            finally:
                client.run_instances = ask
