package inventory

import (
	"strconv"
	"strings"
)

// xid is an error that the driver reported of a card: https://docs.nvidia.com/deploy/xid-errors/.
type xid uint64

// application says whether the error is one that a program on the card brings about (a page fault, its being killed)
// and that leaves the card as good as before. The list is that of the health check of NVIDIA's own device plugin
// (github.com/NVIDIA/k8s-device-plugin, internal/rm/health.go).
func (x xid) application() bool {
	switch x {
	case 13, // graphics engine exception
		31,  // GPU memory page fault
		43,  // GPU stopped processing
		45,  // preemptive clean-up
		68,  // video processor exception
		109: // context switch timeout
		return true
	}
	return false
}

const xidPrefix = "Xid "

func (x xid) String() string { return xidPrefix + strconv.FormatUint(uint64(x), 10) }

// fromXid says whether a card is unhealthy for a Xid error, by the reason that it was told with.
func fromXid(reason string) bool { return strings.HasPrefix(reason, xidPrefix) }

// event is a Xid error of one card.
type event struct {
	// uuid is empty where the driver couldn't say which card it was.
	uuid string
	xid  xid
}
