"""`ConversationRouter`: `decide.ReplicaRouting` as a request router of Ray Serve. It runs in the front's process.

Serve sends this module to that process by value: a global of it would be another object there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from foretoken.scale.decide import ReplicaRouting, note_live


class ConversationRouter(ConsistentHashRouter):  # type: ignore[misc]  # Ray is not in every environment
    """Routes by the keywords `prefix` and `replica` of a call.

    Of its parent it keeps how waiting requests are taken up again when replicas change, and changes which replica is
    chosen.
    """

    def initialize_state(self, **kwargs: Any) -> None:  # noqa: ANN401
        """See `RequestRouter`."""
        super().initialize_state(**kwargs)
        self._routing = ReplicaRouting()
        self._chosen: dict[str, tuple[str, Any]] = {}  # by call: its replica, and the request that Serve keeps for it

    def update_replicas(self, replicas: list[Any]) -> None:
        """See `RequestRouter`."""
        super().update_replicas(replicas)
        note_live(replica.replica_id.unique_id for replica in replicas)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:  # noqa: ANN401
        """See `RequestRouter`: lists of replicas, the best first."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas] if candidate_replicas else []
        pending_request.routing_context.should_backoff = True  # between rounds in which no replica took the request
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        # Its lengths count the calls of other fronts too, but late: by them alone a burst would go to one replica.
        lengths, own = self.replica_queue_len_cache, self._own_loads()
        loads = {name: max(lengths.get(one.replica_id) or 0, own[name]) for name, one in by_name.items()}
        asked, call = pending_request.kwargs, pending_request.metadata.internal_request_id
        ranked = self._routing.ranked(asked.get("prefix", b""), loads, asked.get("replica", ""))
        self._chosen[call] = ranked[0], pending_request
        return [[by_name[name]] for name in ranked]

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:  # noqa: ANN401
        """See `RequestRouter`."""
        super().on_request_completed(replica_id, internal_request_id)
        self._chosen.pop(internal_request_id, None)

    def _own_loads(self) -> Counter[str]:
        """This front's calls by replica; those that were cancelled before a replica had them are forgotten."""
        self._chosen = {call: one for call, one in self._chosen.items() if not one[1].future.cancelled()}
        return Counter(name for name, _ in self._chosen.values())
