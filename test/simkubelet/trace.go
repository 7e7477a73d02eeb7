package simkubelet

import (
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Call names a call on one of the node's APIs.
type Call string

// The calls that are traced.
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

// Event is one call that has ended. ListAndWatch gives one event for each message and one, with Err, for the stream's end.
type Event struct {
	Call     Call
	Resource string
	// PodUID and Container are those that the kubelet makes the call for; the plugin isn't told. PodUID is empty for
	// PodResources, which asks by Namespace and Name.
	PodUID          types.UID
	Container       string
	Namespace, Name string
	// Devices are the IDs asked for (Allocate, PreStartContainer), preferred (GetPreferredAllocation) or, for
	// ListAndWatch, absent. Available, MustInclude and Size belong to GetPreferredAllocation; Available is the number
	// of devices for ListAndWatch too.
	Devices     []string
	MustInclude []string
	Available   int
	Size        int
	Env         map[string]string
	Start, End  time.Time
	Err         error
}
