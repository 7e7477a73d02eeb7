# `make` prints the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo v0.0.0-dev)
COMMIT  ?= $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
STAMP   := -X github.com/gpushare/gpushare/pkg/version.version=$(VERSION) -X github.com/gpushare/gpushare/pkg/version.commit=$(COMMIT)
GO      ?= go
BIN     ?= bin
# The bindings of the driver library have all of its functions, and the compiler would warn of each deprecated one.
export CGO_CFLAGS ?= -g -O2 -Wno-deprecated-declarations
# With one setting for programs, tests and linter, packages are compiled once for all of them.
export GOFLAGS ?= -trimpath
# The linter and the test runner are pinned in a separate module.
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

# grpcnotrace omits gRPC's debug pages. Their templates prevent the linker from removing unused methods (19 MB).
.PHONY: build-plugin
build-plugin:
	CGO_ENABLED=1 $(GO) build -trimpath -buildvcs=false -tags grpcnotrace -ldflags "-s -w $(STAMP) -extldflags '-Wl,-z,lazy'" -o $(BIN)/ ./cmd/gpushare-device-plugin

.PHONY: kube
kube: ## build the pinned etcd and Kubernetes binaries into bin/kube (minutes, the first time)
	@hack/kube/build.sh

.PHONY: kube-node
kube-node: ## build the pinned containerd, runc, CNI plugins and NVIDIA's CDI hook into bin/kube (minutes, the first time)
	@hack/kube/build.sh node

.PHONY: fake-nvml
fake-nvml: ## build the fake NVIDIA driver library into bin/fake-nvml
	@test/fakenvml/build.sh bin/fake-nvml/libnvidia-ml.so.1

.PHONY: manifests
manifests: ## render the plain manifests and the scheduler's configurations from the Helm chart
	@$(GO) run ./hack/manifests

.PHONY: clean
clean: ## remove the built files (the Kubernetes binaries stay in the user's cache)
	rm -rf bin

##@ Try

.PHONY: demo
demo: first-build build fake-nvml ## show pods that share cards on a real control plane with simulated GPU nodes (KEEP=1 keeps it running, FAIR_SHARE=dispatch with fair sharing; USER_PAGES=1 runs the commands of the pages for users)
	@hack/kube/build.sh control-plane $(if $(KEEP)$(USER_PAGES),kube-controller-manager)
	@$(GO) build -o $(BIN)/demo ./test/demo
	@exec $(BIN)/demo $(if $(KEEP),--keep) $(if $(FAIR_SHARE),--fair-share=$(FAIR_SHARE)) $(if $(USER_PAGES),--user-pages="$$($(GO) -C hack/helm tool -n kubectl)") # Not with go run, which reports Ctrl-C as an error.

.PHONY: first-build
first-build:
	@[ -e $(BIN)/kube/kube-apiserver ] || echo "The first build of etcd and Kubernetes takes about a quarter of an hour on two cores, downloads included."

##@ Test

.PHONY: lint
lint: ## run the linter, which also checks the imports between packages
	@linter=$$($(TOOL) golangci-lint) && $$linter run ./... && cd test/browser && $$linter run ./...

.PHONY: test
test: build kube fake-nvml ## run all tests that this machine can run, and list the skipped ones
	@hack/test.sh

.PHONY: test-long
test-long: build kube kube-node fake-nvml ## run the long form of all tests, with more pods, rounds and kills, and each benchmark once (about an hour)
	@GPUSHARE_TEST_LONG=1 hack/test.sh
	@GPUSHARE_TEST_LONG=1 hack/node-e2e.sh
	$(GO) test -run '^$$' -bench . -benchtime 1x ./pkg/...

.PHONY: test-versions
test-versions: build kube fake-nvml ## run some tests on the other Kubernetes versions that hack/kube pins, or on VERSIONS="v1.34" (builds each the first time: 5 minutes)
	@hack/versions.sh $(VERSIONS)

.PHONY: test-neighbours
test-neighbours: build kube fake-nvml ## run some tests with components of other projects, such as Kueue and the descheduler (builds them the first time, in minutes)
	@hack/kube/build.sh neighbours
	GPUSHARE_REQUIRE_CONTROL_PLANE=1 $(GO) test -count=1 -vet=off -ldflags "-w -extldflags=-Wl,-z,lazy" ./test/neighbours

# The commit of the earlier version: of a release the last one's tag, until then the last commit before the one queue.
FROM ?= 241ab6ae1680522b36bc7dee0764f64ce8dee458

.PHONY: test-upgrade
test-upgrade: build kube fake-nvml ## run an earlier version's extender, FROM=COMMIT of git's history, and this one in one cluster: an upgrade and a downgrade under load
	@hack/former.sh $(FROM)
	GPUSHARE_REQUIRE_CONTROL_PLANE=1 $(GO) test -count=1 -vet=off -ldflags "-w -extldflags=-Wl,-z,lazy" ./test/upgrade ./test/install -run '^(TestRollout|TestCounts|TestFormerFlags)$$'

.PHONY: e2e-node
e2e-node: build kube kube-node fake-nvml ## run real pods on a real kubelet (root on Linux; hack/node-packages.sh installs the tools), or RUN=TestSeveralCards on KUBERNETES=v1.34
	@KUBERNETES=$(KUBERNETES) hack/node-e2e.sh $(if $(RUN),-run '$(RUN)')

.PHONY: test-gpu
test-gpu: ## run the node tests with the real NVIDIA driver, if this machine has one
	$(GO) test -count=1 -timeout 2m -v -ldflags "-extldflags=-Wl,-z,lazy" ./test/realgpu

.PHONY: bench
bench: build kube ## run the benchmarks, with and without the extender (BENCH="-nodes 5000" sets flags)
	$(GO) test -run '^$$' -bench . -benchmem ./pkg/placement ./pkg/preemption ./pkg/ledger ./pkg/eviction ./pkg/extender ./pkg/dispatch ./pkg/diagnosis ./pkg/metrics ./pkg/clustercache
	$(GO) run ./test/bench $(BENCH)

.PHONY: bench-packing
bench-packing: ## compare how much of its cards a public trace's cluster allocates with published policies: OPENB=DIR POLICY=least-waste SEEDS=10 WORKLOADS=default,cpu250 AT=100, or NODES=30
	@$(GO) run ./test/packing -openb '$(OPENB)' $(if $(POLICY),-policy '$(POLICY)') $(if $(SEEDS),-seeds '$(SEEDS)') $(if $(WORKLOADS),-workloads '$(WORKLOADS)') $(if $(AT),-at '$(AT)') $(if $(NODES),-nodes '$(NODES)')

.PHONY: soak
soak: build kube fake-nvml ## run a simulated week under load and faults and report whether anything grows (three hours; SOAK="-for 90m")
	@$(GO) build -o $(BIN)/soak ./test/soak
	@exec $(BIN)/soak $(SOAK)

.PHONY: soak-short
soak-short: SOAK = -for 105s -rate 5
soak-short: soak ## run the short form of the simulated week, in two minutes

.PHONY: fuzz
fuzz: ## run every fuzz target for FUZZTIME (10s)
	@hack/fuzz.sh

##@ Release

# PUSH=--push pushes the images to REGISTRY; otherwise they stay in the engine's cache.
REGISTRY ?= ghcr.io/gpushare
PLATFORMS ?= linux/amd64,linux/arm64
# Attach a bill of materials and the build's provenance to the images. Docker's default builder can't; use ATTEST= then.
ATTEST ?= --sbom=true --provenance=mode=max
# The builder image, golang:TAG@sha256:... in a release; by default the one in the Dockerfiles.
GO_IMAGE ?=
BUILDX = docker buildx build --platform $(PLATFORMS) $(ATTEST) $(if $(GO_IMAGE),--build-arg GO_IMAGE=$(GO_IMAGE)) --build-arg VERSION=$(VERSION) --build-arg COMMIT=$(COMMIT)

.PHONY: images
images: ## build the images for amd64 and arm64 with docker buildx (REGISTRY=..., PUSH=--push)
	@docker buildx version >/dev/null 2>&1 && docker info >/dev/null 2>&1 || { echo "make images needs Docker with buildx and a running engine; without one use make image-archives" >&2; exit 1; }
	$(BUILDX) -f Dockerfile.extender -t $(REGISTRY)/gpushare-extender:$(VERSION) $(PUSH) .
	$(BUILDX) -f Dockerfile.deviceplugin -t $(REGISTRY)/gpushare-device-plugin:$(VERSION) $(PUSH) .
	$(BUILDX) -f Dockerfile.deviceplugin --build-arg SIMULATED=-simulated -t $(REGISTRY)/gpushare-device-plugin-simulated:$(VERSION) $(PUSH) .

.PHONY: image-archives
image-archives: build ## build the images as OCI archives into bin/images, without a container engine (ARCH="amd64 arm64")
	@VERSION=$(VERSION) COMMIT=$(COMMIT) REGISTRY=$(REGISTRY) hack/images/build.sh $(ARCH)
