package inventory

import (
	"strconv"
	"strings"
)

// xid is the number of an error that the driver reports for a card: https://docs.nvidia.com/deploy/xid-errors/.
type xid uint64

// application reports whether the error is caused by a program on the card, such as a page fault or the end of a killed
// program, and leaves the card intact. The list is that of the health check of NVIDIA's device plugin
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

// needsReset reports whether only a reset of the card, or a restart of the machine, ends the fault. These are the Xids for
// which NVIDIA's catalog has the immediate action RESET_GPU, RESTART_VM or RESTART_BM
// (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html). It returns false for the Xids for which the action
// depends on more than the number (48, 74, 144 to 150, 154): for those the driver's recovery action decides.
func (x xid) needsReset() bool {
	switch x {
	case 46, // GPU stopped processing
		62,  // internal micro-controller halt
		64,  // memory remapping failure
		79,  // fallen off the bus
		95,  // uncontained memory error
		109, // context switch timeout
		110, // security fault
		119, // GSP RPC timeout
		120, // GSP error
		136, // link training failed
		140, // unrecovered ECC error
		143, // initialization error
		151, // key rotation error
		155, // NVLink: software-defined error
		156, // resource retirement event
		158: // fatal timeout
		return true
	}
	return false
}

func (x xid) String() string { return xidPrefix + strconv.FormatUint(uint64(x), 10) }

// event is a Xid error of one card.
type event struct {
	// uuid is empty if the driver could not name the card.
	uuid string
	xid  xid
}

// XidChecks selects the Xid errors that make a card unhealthy; the zero value all but those that programs cause. A Xid that is
// in both sets is enabled.
type XidChecks struct {
	Disabled, Enabled XidSet
}

// XidSet is a set of Xids. The zero value is the empty set.
type XidSet struct {
	// If all is true, the set contains every Xid.
	all  bool
	some map[xid]bool
}

// ParseXids parses a list that NVIDIA's device plugin reads from DP_DISABLE_HEALTHCHECKS or DP_ENABLE_HEALTHCHECKS: a
// comma-separated list of Xids; "all" or "xids" stands for every Xid. Like NVIDIA's plugin, it ignores other words, and
// returns them as malformed.
func ParseXids(list string) (set XidSet, malformed []string) {
	for word := range strings.SplitSeq(list, ",") {
		word = strings.ToLower(strings.TrimSpace(word))
		number, err := strconv.ParseUint(word, 10, 64)
		switch {
		case word == "":
		case word == "all" || word == "xids":
			set.all = true
		case err != nil:
			malformed = append(malformed, word)
		default:
			if set.some == nil {
				set.some = map[xid]bool{}
			}
			set.some[xid(number)] = true
		}
	}
	return set, malformed
}

// count reports whether a Xid makes its card unhealthy.
func (c XidChecks) count(x xid) bool {
	switch {
	case c.Enabled.all || c.Enabled.some[x]:
		return true
	case c.Disabled.all || c.Disabled.some[x]:
		return false
	}
	return !x.application()
}
