package protocol

import (
	"strconv"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// ContainerEnv determines the environment variables of a GPU container.
type ContainerEnv struct {
	Card gpu.Card
	// VisibleAs identifies the card to NVIDIA's container runtime: its UUID or its index.
	VisibleAs string
	// PodRequest is the pod's total request, ContainerRequest this container's part of it.
	PodRequest, ContainerRequest gpu.Memory
	// DisableIsolation is set on nodes labelled LabelDisableIsolation.
	DisableIsolation bool
}

// Variables returns the environment variables.
func (e ContainerEnv) Variables() map[string]string {
	env := map[string]string{
		EnvVisibleDevices: e.VisibleAs,
		AnnotationIndex:   strconv.Itoa(e.Card.Index),
		AnnotationPod:     e.PodRequest.String(),
		AnnotationDevice:  e.Card.Memory.String(),
		EnvContainer:      e.ContainerRequest.String(),
	}
	if e.DisableIsolation {
		env[EnvDisableIsolation] = "true"
	}
	return env
}
