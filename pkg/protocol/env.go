package protocol

import (
	"strconv"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// ContainerEnv determines the environment variables of a GPU container. It has one card at least.
type ContainerEnv struct {
	Cards []gpu.Card
	// VisibleAs identifies each of the cards to NVIDIA's container runtime: its UUID or its index.
	VisibleAs []string
	// PodRequest is the pod's total request, ContainerRequest this container's part of it, over all cards.
	PodRequest, ContainerRequest gpu.Memory
	// ContainerCores is the computing that this container asks for, over all cards.
	ContainerCores gpu.Cores
	// DisableIsolation is set on nodes labelled LabelDisableIsolation.
	DisableIsolation bool
	// Allowed is how much of each card the container may use, in bytes, if that is more than it requests; else 0.
	Allowed uint64
	// RDMAPorts are the active ports of the container's RDMA adapters, as in gpu.Card; empty if it has none.
	RDMAPorts string
}

// Variables returns the environment variables.
func (e ContainerEnv) Variables() map[string]string {
	indexes, memories := make([]string, len(e.Cards)), make([]string, len(e.Cards))
	for i, card := range e.Cards {
		indexes[i], memories[i] = strconv.Itoa(card.Index), card.Memory.String()
	}
	n := max(len(e.Cards), 1)
	env := map[string]string{
		EnvVisibleDevices: strings.Join(e.VisibleAs, separator),
		AnnotationIndex:   strings.Join(indexes, separator),
		AnnotationPod:     e.PodRequest.String(),
		AnnotationDevice:  strings.Join(memories, separator),
		EnvContainer:      (e.ContainerRequest / gpu.Memory(n)).String(),
	}
	if e.ContainerCores > 0 {
		env[EnvCores] = e.ContainerCores.PerCard(n).String()
	}
	if n > 1 {
		env[EnvDeviceOrder] = "PCI_BUS_ID"
	}
	if e.DisableIsolation {
		env[EnvDisableIsolation] = "true"
	}
	if e.Allowed > 0 {
		env[EnvMemoryLimit] = strconv.FormatUint(e.Allowed/uint64(gpu.MiB), 10)
	}
	if e.RDMAPorts != "" {
		env[EnvRDMAPorts] = e.RDMAPorts
	}
	return env
}

// AllowedOf returns how much of each card a container may use by its environment variables, in bytes; 0 if that isn't more than it requests.
func AllowedOf(env map[string]string) uint64 {
	mebibytes, err := strconv.ParseUint(env[EnvMemoryLimit], 10, 43)
	if err != nil {
		return 0
	}
	return mebibytes * uint64(gpu.MiB)
}

// CoresOf returns the computing of each card that a container's environment variables name; zero if they name none.
func CoresOf(env map[string]string) gpu.Cores { return gpu.NewCores(int64(parseMemory(env[EnvCores]))) }
