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
	// DisableIsolation is set on nodes labelled LabelDisableIsolation.
	DisableIsolation bool
}

// Variables returns the environment variables.
func (e ContainerEnv) Variables() map[string]string {
	indexes, memories := make([]string, len(e.Cards)), make([]string, len(e.Cards))
	for i, card := range e.Cards {
		indexes[i], memories[i] = strconv.Itoa(card.Index), card.Memory.String()
	}
	env := map[string]string{
		EnvVisibleDevices: strings.Join(e.VisibleAs, separator),
		AnnotationIndex:   strings.Join(indexes, separator),
		AnnotationPod:     e.PodRequest.String(),
		AnnotationDevice:  strings.Join(memories, separator),
		EnvContainer:      (e.ContainerRequest / gpu.Memory(max(len(e.Cards), 1))).String(),
	}
	if e.DisableIsolation {
		env[EnvDisableIsolation] = "true"
	}
	return env
}
