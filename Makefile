# `make` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo v0.0.0-dev)
COMMIT  ?= $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
STAMP   := -X github.com/gpushare/gpushare/pkg/version.version=$(VERSION) -X github.com/gpushare/gpushare/pkg/version.commit=$(COMMIT)
GO      ?= go
# The linter and the test runner, pinned in a module of their own.
TOOL    := $(GO) -C hack/tools tool -n

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# grpcnotrace leaves out gRPC's debug pages, whose templates keep the linker from dropping unused methods: 19 MB.
.PHONY: build
build: ## build the three binaries into bin/
	CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -ldflags '-s -w $(STAMP)' -o bin/ ./cmd/gpushare-extender ./cmd/kubectl-inspect-gpushare
	CGO_ENABLED=1 $(GO) build -trimpath -buildvcs=false -tags grpcnotrace -ldflags "-s -w $(STAMP) -extldflags '-Wl,-z,lazy'" -o bin/ ./cmd/gpushare-device-plugin

.PHONY: kube
kube: ## build the pinned etcd and Kubernetes binaries into bin/kube (minutes, once)
	@hack/kube/build.sh

.PHONY: fake-nvml
fake-nvml: ## build the fake NVIDIA driver library into bin/fake-nvml
	@test/fakenvml/build.sh bin/fake-nvml/libnvidia-ml.so.1

.PHONY: demo
demo: build kube fake-nvml ## play the main job end to end on this machine (KEEP=1 leaves it running)
	@$(GO) run ./test/demo $(if $(KEEP),--keep)

.PHONY: test
test: build kube fake-nvml ## run everything that this machine can run, and say what was skipped
	@hack/test.sh

.PHONY: e2e-node
e2e-node: build kube fake-nvml ## run real pods on a real kubelet (root on Linux, with containerd and runc: hack/node-packages.sh)
	@hack/node-e2e.sh

.PHONY: test-gpu
test-gpu: ## run the node's half against the real NVIDIA driver, where this machine has one
	$(GO) test -count=1 -v -ldflags "-extldflags=-Wl,-z,lazy" ./test/realgpu

.PHONY: bench
bench: build kube ## run the benchmarks, beside the same control plane without the extender (BENCH="-nodes 5000" changes it)
	$(GO) test -run '^$$' -bench . -benchmem ./pkg/placement ./pkg/ledger ./pkg/extender ./pkg/deviceplugin
	$(GO) run ./test/bench $(BENCH)

.PHONY: lint
lint: ## run the linter, which also holds the package arrows
	@linter=$$($(TOOL) golangci-lint) && $$linter run ./...

.PHONY: fuzz
fuzz: ## run every fuzz target for FUZZTIME (10s)
	@hack/fuzz.sh

.PHONY: clean
clean: ## remove what was built (the Kubernetes binaries stay in the user's cache)
	rm -rf bin
