package protocol

import "strings"

// IsolationMPS is the isolation mode of a node whose containers share each card by a control daemon of its own (MPS). A container
// can be a client of one daemon only.
const IsolationMPS = "mps"

// PodIsolation is the value of a pod's AnnotationIsolation. The zero value is that of a pod without the annotation.
type PodIsolation struct {
	// Mode is the isolation mode in which the pod's containers were started.
	Mode string
	// Problem is which limit is not in force and why; empty if all are.
	Problem string
}

// String returns the annotation's value.
func (p PodIsolation) String() string {
	if p.Problem == "" {
		return p.Mode
	}
	return p.Mode + ": " + p.Problem
}

// ParsePodIsolation parses a pod's annotation, and shortens its texts.
func ParsePodIsolation(annotations map[string]string) PodIsolation {
	mode, problem, _ := strings.Cut(annotations[AnnotationIsolation], ":")
	return PodIsolation{Mode: Shorten(mode), Problem: Shorten(strings.TrimSpace(problem))}
}
