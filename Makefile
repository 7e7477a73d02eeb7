# `make` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo v0.0.0-dev)
COMMIT  ?= $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
STAMP   := -X github.com/gpushare/gpushare/pkg/version.version=$(VERSION) -X github.com/gpushare/gpushare/pkg/version.commit=$(COMMIT)
GO      ?= go
BIN     ?= bin
# The linter and the test runner, pinned in a module of their own.
TOOL    := $(GO) -C hack/tools tool -n

.PHONY: help
help:
	@awk -F ':.*## ' '/^##@ / {print "\n" substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Build

.PHONY: build
build: build-static build-plugin ## build the binaries into bin/

.PHONY: build-static
build-static:
	CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -ldflags '-s -w $(STAMP)' -o $(BIN)/ ./cmd/gpushare-extender ./cmd/kubectl-inspect-gpushare
	@ln -sf kubectl-inspect-gpushare $(BIN)/kubectl_complete-inspect-gpushare

# grpcnotrace leaves out gRPC's debug pages, whose templates keep the linker from dropping unused methods: 19 MB.
.PHONY: build-plugin
build-plugin:
	CGO_ENABLED=1 $(GO) build -trimpath -buildvcs=false -tags grpcnotrace -ldflags "-s -w $(STAMP) -extldflags '-Wl,-z,lazy'" -o $(BIN)/ ./cmd/gpushare-device-plugin

.PHONY: kube
kube: ## build the pinned etcd and Kubernetes binaries into bin/kube (minutes, once)
	@hack/kube/build.sh

.PHONY: fake-nvml
fake-nvml: ## build the fake NVIDIA driver library into bin/fake-nvml
	@test/fakenvml/build.sh bin/fake-nvml/libnvidia-ml.so.1

.PHONY: manifests
manifests: ## render the plain manifests and the scheduler's configurations from the Helm chart
	@$(GO) run ./hack/manifests

.PHONY: clean
clean: ## remove what was built (the Kubernetes binaries stay in the user's cache)
	rm -rf bin

##@ Try

.PHONY: demo
demo: build kube fake-nvml ## let pods share cards on a real control plane with simulated GPU nodes (KEEP=1 leaves it running)
	@$(GO) build -o $(BIN)/demo ./test/demo
	@exec $(BIN)/demo $(if $(KEEP),--keep) # Not by way of go run, which calls Ctrl-C an error.

##@ Test

.PHONY: lint
lint: ## run the linter, which also holds the package arrows
	@linter=$$($(TOOL) golangci-lint) && $$linter run ./...

.PHONY: test
test: build kube fake-nvml ## run everything that this machine can run, and say what was skipped
	@hack/test.sh

.PHONY: test-long
test-long: build kube fake-nvml ## the same with the long forms: more pods, more rounds, more kills (an hour or so)
	@GPUSHARE_TEST_LONG=1 hack/test.sh
	@GPUSHARE_TEST_LONG=1 hack/node-e2e.sh

.PHONY: test-versions
test-versions: build kube fake-nvml ## run a part of the tests on the other Kubernetes versions that hack/kube pins (builds them: a quarter of an hour, once)
	@hack/versions.sh

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

.PHONY: fuzz
fuzz: ## run every fuzz target for FUZZTIME (10s)
	@hack/fuzz.sh

##@ Release

# PUSH=--push sends the images to REGISTRY; without it they stay in the engine's cache.
REGISTRY ?= ghcr.io/gpushare
PLATFORMS ?= linux/amd64,linux/arm64
# A bill of materials and the build's provenance, attached to the images; Docker's default builder can't: ATTEST= leaves them out.
ATTEST ?= --sbom=true --provenance=mode=max
# The builder image, golang:TAG@sha256:... in a release; what the Dockerfiles name where empty.
GO_IMAGE ?=
BUILDX = docker buildx build --platform $(PLATFORMS) $(ATTEST) $(if $(GO_IMAGE),--build-arg GO_IMAGE=$(GO_IMAGE)) --build-arg VERSION=$(VERSION) --build-arg COMMIT=$(COMMIT)

.PHONY: images
images: ## build the images for amd64 and arm64 with docker buildx (REGISTRY=..., PUSH=--push)
	@docker buildx version >/dev/null 2>&1 && docker info >/dev/null 2>&1 || { echo "make images takes Docker with buildx and a running engine; without one: make image-archives" >&2; exit 1; }
	$(BUILDX) -f Dockerfile.extender -t $(REGISTRY)/gpushare-extender:$(VERSION) $(PUSH) .
	$(BUILDX) -f Dockerfile.deviceplugin -t $(REGISTRY)/gpushare-device-plugin:$(VERSION) $(PUSH) .

.PHONY: image-archives
image-archives: build ## build the images as OCI archives into bin/images, each with its bill of materials, without a container engine (ARCH="amd64 arm64")
	@VERSION=$(VERSION) COMMIT=$(COMMIT) REGISTRY=$(REGISTRY) hack/images/build.sh $(ARCH)
