package protocol

import (
	"strconv"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// ContainerEnv is what a container learns about its card.
type ContainerEnv struct {
	// Card is the card that was handed out.
	Card gpu.Card
	// VisibleAs is the name by which NVIDIA's runtime finds the card: its UUID or its index.
	VisibleAs string
	// PodRequest and ContainerRequest are the pod's whole request and this container's part of it.
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
