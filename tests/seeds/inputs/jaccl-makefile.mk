MODEL_DIR   ?=
HOSTFILE    ?= hosts-2node.json
HTTP_PORT   ?= 8080
CTRL_PORT   := 18080
QUEUE_MAX   ?= 8
RDMA_ROUNDS ?= 20
.PHONY: server
server: verify
	MODEL_DIR=$(MODEL_DIR) bash scripts/server.sh

ifdef REMOTE
endif
