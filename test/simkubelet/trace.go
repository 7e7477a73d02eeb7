package simkubelet

import (
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Call is the name of a call of one of the node's APIs.
type Call string

// The traced calls.
const (
	CallRegister                = Call("Register")
	CallGetDevicePluginOptions  = Call("GetDevicePluginOptions")
	CallListAndWatch            = Call("ListAndWatch")
	CallGetPreferredAllocation  = Call("GetPreferredAllocation")
	CallAllocate                = Call("Allocate")
	CallPreStartContainer       = Call("PreStartContainer")
	CallPodResourcesGet         = Call("PodResources/Get")
	CallPodResourcesList        = Call("PodResources/List")
	CallPodResourcesAllocatable = Call("PodResources/GetAllocatableResources")
)

// Event is one finished call. ListAndWatch has one event for each message, and one with Err for the end of the stream.
type Event struct {
	Call     Call
	Resource string
	// PodUID and Container are those for which the kubelet makes the call; the call to the plugin doesn't contain them.
	// PodUID is empty for PodResources, whose requests contain Namespace and Name.
	PodUID          types.UID
	Container       string
	Namespace, Name string
	// Devices are the requested IDs (Allocate, PreStartContainer) or the preferred ones (GetPreferredAllocation).
	// Available, MustInclude and Size are arguments of GetPreferredAllocation. For ListAndWatch, Available is the
	// number of devices.
	Devices     []string
	MustInclude []string
	Available   int
	Size        int
	Env         map[string]string
	Start, End  time.Time
	Err         error
}
