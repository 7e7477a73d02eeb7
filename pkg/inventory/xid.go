package inventory

import (
	"strconv"
	"strings"
)

// xid is an error that the driver reported of a card: https://docs.nvidia.com/deploy/xid-errors/.
type xid uint64

// application reports whether the error is one that a program on the card brings about (a page fault, its being killed)
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

// needsReset reports whether only a reset of the card, or a restart of the machine, ends what the error stands for. These
// are the Xids for which NVIDIA's catalog has the immediate action RESET_GPU, RESTART_VM or RESTART_BM
// (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html). Those for which it depends on more than the
// number (48, 74, 144 to 150, 154) aren't: the driver's recovery action tells.
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

const (
	xidPrefix = "Xid "
	// reasonReset follows the number of a Xid that only a reset ends.
	reasonReset = ", until the card is reset or the machine restarts"
	// reasonAsked follows reasonReset where the driver has asked for the reset too: it tells when that was done.
	reasonAsked = "; the driver asks for it"
)

func (x xid) String() string { return xidPrefix + strconv.FormatUint(uint64(x), 10) }

// reason returns why a card is unhealthy on which the error was reported. parseReason reads it back.
func (x xid) reason() string {
	if x.needsReset() {
		return x.String() + reasonReset
	}
	return x.String()
}

// parseReason returns the Xid error that made a card unhealthy, by the reason that was reported with it, and whether only
// a reset ends it. It returns false where it wasn't a Xid.
func parseReason(reason string) (x xid, sticky, ok bool) {
	rest, ok := strings.CutPrefix(reason, xidPrefix)
	if !ok {
		return 0, false, false
	}
	digits := len(rest) - len(strings.TrimLeft(rest, "0123456789"))
	number, err := strconv.ParseUint(rest[:digits], 10, 64)
	return xid(number), strings.HasPrefix(rest[digits:], reasonReset), err == nil
}

// event is a Xid error of one card.
type event struct {
	// uuid is empty where the driver couldn't say which card it was.
	uuid string
	xid  xid
}

// XidChecks are the Xid errors that make a card unhealthy. The zero value takes all but those that a program on the card
// brings about.
type XidChecks struct {
	disabled, enabled xidSet
}

// xidSet is a set of Xids, or all of them.
type xidSet struct {
	all  bool
	some map[xid]bool
}

// ParseXidChecks reads the lists that NVIDIA's device plugin has in DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS:
// Xids with commas between them, or "all" or "xids" for all of them. An enabled Xid counts whatever disables it. Like
// NVIDIA's plugin it passes over what is no number, and returns it for the log.
func ParseXidChecks(disable, enable string) (checks XidChecks, malformed []string) {
	for list, set := range map[*string]*xidSet{&disable: &checks.disabled, &enable: &checks.enabled} {
		set.some = map[xid]bool{}
		for word := range strings.SplitSeq(*list, ",") {
			word = strings.ToLower(strings.TrimSpace(word))
			number, err := strconv.ParseUint(word, 10, 64)
			switch {
			case word == "":
			case word == "all" || word == "xids":
				set.all = true
			case err != nil:
				malformed = append(malformed, word)
			default:
				set.some[xid(number)] = true
			}
		}
	}
	return checks, malformed
}

// count reports whether a Xid makes its card unhealthy.
func (c XidChecks) count(x xid) bool {
	switch {
	case c.enabled.all || c.enabled.some[x]:
		return true
	case c.disabled.all || c.disabled.some[x]:
		return false
	}
	return !x.application()
}
