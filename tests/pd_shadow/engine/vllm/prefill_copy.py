"""What a decode instance sees of its prefill instance, without a second engine: KV that can be read over real NIXL."""

import dataclasses
import threading
from typing import Any

import msgspec
import torch

HOST = "127.0.0.1"


class PrefillCopy:
    """A NIXL agent that serves a copy of the running engine's KV pool as it is now, under an engine id of its own.

    `compatible=False`: its handshake is refused, as that of another vLLM version is.
    """

    def __init__(self, engine_id: str, port: int, *, compatible: bool = True) -> None:
        from nixl._api import nixl_agent, nixl_agent_config
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

        nixl = next(
            child for child in get_kv_transfer_group().sub_connectors if type(child).__name__ == "NixlPullConnector"
        )
        worker = nixl.connector_worker
        self._engine_id = engine_id
        self._port = port
        self._agent = nixl_agent(engine_id, nixl_agent_config(backends=["UCX"]))
        self._copies: dict[int, torch.Tensor] = {}
        for tensor in worker.device_kv_caches.values():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._copies:
                copy = torch.tensor([], dtype=torch.uint8).set_(storage).clone()
                self._copies[storage.data_ptr()] = copy
                self._agent.register_memory(self._agent.get_reg_descs([(copy.data_ptr(), copy.nbytes, 0, "")], "DRAM"))
        payload = worker.xfer_handshake_metadata
        metadata = msgspec.msgpack.Decoder(NixlAgentMetadata).decode(payload.agent_metadata_bytes)
        mine = dataclasses.replace(
            metadata,
            engine_id=engine_id,
            agent_metadata=self._agent.get_agent_metadata(),
            kv_caches_base_addr=[self._moved(address) for address in metadata.kv_caches_base_addr],
        )
        encoded = msgspec.msgpack.encode(
            dataclasses.replace(
                payload,
                agent_metadata_bytes=msgspec.msgpack.encode(mine),
                compatibility_hash=payload.compatibility_hash if compatible else "another version",
            )
        )
        ready, self._stop = threading.Event(), threading.Event()
        threading.Thread(
            target=NixlBaseConnectorScheduler._nixl_handshake_listener,
            args=({(0, 0): encoded}, ready, self._stop, HOST, port),
            daemon=True,
        ).start()
        ready.wait()

    def params(self, request_id: str, block_ids: list[int], tokens: int) -> dict[str, Any]:
        """`kv_transfer_params` with which D fetches these blocks of the pool."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request_id,
            "remote_block_ids": [block_ids],
            "remote_host": HOST,
            "remote_port": self._port,
            "remote_num_tokens": tokens,
            "tp_size": 1,
        }

    def released(self) -> list[str]:
        """Request ids whose blocks D has told P to free since the last call."""
        messages = [message.decode() for found in self._agent.get_new_notifs().values() for message in found]
        return [message.rpartition(":")[0] for message in messages if not message.startswith("HB:")]

    def close(self) -> None:
        self._stop.set()

    def _moved(self, address: int) -> int:
        for start, copy in self._copies.items():
            if start <= address < start + copy.nbytes:
                return copy.data_ptr() + address - start
        raise AssertionError(f"{address:#x} lies outside the KV pool")
