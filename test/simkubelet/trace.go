package simkubelet

import (
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Call is the name of a call of one of the node's APIs.
type Call string

// The traced calls.
const (
	CallListAndWatch           = Call("ListAndWatch")
	CallGetPreferredAllocation = Call("GetPreferredAllocation")
	CallAllocate               = Call("Allocate")
	CallPodResourcesGet        = Call("PodResources/Get")
)

// Event is one finished call. ListAndWatch has one event for each message, and one with Err for the end of the stream.
type Event struct {
	Call Call
	// PodUID is the pod for which the kubelet calls the plugin; the call itself doesn't contain it.
	PodUID types.UID
	// Env is the environment in the answer to Allocate.
	Env        map[string]string
	Start, End time.Time
	Err        error
}

// traced makes a call and reports it to the trace.
func traced(trace func(Event), event Event, call func(*Event) error) error {
	event.Start = time.Now()
	event.Err = call(&event)
	event.End = time.Now()
	trace(event)
	return event.Err
}
