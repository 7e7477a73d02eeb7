package inventory

import (
	"errors"
	"strconv"
	"strings"
)

// health is the state of a card. transitions has its changes.
type health int

const (
	// healthy means that the card can be used.
	healthy health = iota
	// failing means that the last listing found an error of the card, or didn't contain it.
	failing
	// recovering means that the card had an error. It is healthy after a quiet period without another one.
	recovering
	// needsReset means that the card had a Xid that only a reset ends.
	needsReset
	// resetAsked is needsReset, and the driver has asked for the reset since. When it no longer asks, the card was reset.
	resetAsked
	// resetLost is needsReset, and the driver has lost the card since. When the driver can read it again, it was reset.
	resetLost
)

// sign is what a listing or an event shows of a card.
type sign int

const (
	// signGood means that the card can be used, and that it is not known whether the driver asks for a reset.
	signGood sign = iota
	// signClean means that the card can be used, and that the driver asks for no reset.
	signClean
	// signUnusable means that the card answers, but can't be used.
	signUnusable
	// signAsks is signUnusable because the driver asks for a reset or another recovery.
	signAsks
	// signError means that the card can't be read.
	signError
	// signLost means that the driver has lost the card or doesn't list it, or can read it only after a reset.
	signLost
	// signXid is a Xid error, signFatalXid one that only a reset ends.
	signXid
	signFatalXid
)

// transitions has the next state for each state and sign. The signs are in their order: good, clean, unusable, asks, error, lost, Xid, fatal
// Xid. In addition, a recovering card that is good or clean after its quiet period is healthy (entry.observe).
var transitions = [...][signFatalXid + 1]health{
	healthy:    {healthy, healthy, failing, failing, failing, failing, recovering, needsReset},
	failing:    {recovering, recovering, failing, failing, failing, failing, failing, needsReset},
	recovering: {recovering, recovering, failing, failing, failing, failing, recovering, needsReset},
	needsReset: {needsReset, needsReset, needsReset, resetAsked, needsReset, resetLost, needsReset, needsReset},
	resetAsked: {resetAsked, recovering, resetAsked, resetAsked, resetAsked, resetLost, resetAsked, resetAsked},
	resetLost:  {recovering, recovering, failing, resetAsked, resetLost, resetLost, resetLost, resetLost},
}

// signOf returns the sign of a card in a listing. err is why it can't be used; nil if it can.
func signOf(d device, err error) sign {
	var answers unusable
	switch {
	case d.lost:
		return signLost
	case err != nil && !errors.As(err, &answers):
		return signError
	case d.recovery > recoveryNone:
		return signAsks
	case err != nil:
		return signUnusable
	case d.recovery == recoveryNone:
		return signClean
	}
	return signGood
}

// answers reports whether the card answers. If it doesn't, a new session may reach it.
func (s sign) answers() bool { return s != signError && s != signLost }

// cause is why a card is not healthy.
type cause struct {
	text string
	// xid is 0 if the cause is no Xid.
	xid xid
}

// The reason of an unhealthy card is its cause, followed by what its state means. The node's inventory has the reason, from which the
// next run of the program restores cause and state (parseReason): the driver reports a Xid only once.
const (
	xidPrefix   = "Xid "
	reasonReset = ", until the card is reset or the machine restarts"
	reasonAsked = reasonReset + "; the driver asks for it"
	reasonLost  = reasonReset + "; the driver has lost the card"
)

var stateReasons = map[health]string{needsReset: reasonReset, resetAsked: reasonAsked, resetLost: reasonLost}

// parseReason returns the cause and the state of a card that was unhealthy for this reason, if the cause is a Xid. Any other problem of a
// card shows again in the next listing, so the card counts as healthy until then.
func parseReason(reason string) (cause, health) {
	rest, ok := strings.CutPrefix(reason, xidPrefix)
	digits := len(rest) - len(strings.TrimLeft(rest, "0123456789"))
	number, err := strconv.ParseUint(rest[:digits], 10, 64)
	if !ok || err != nil {
		return cause{}, healthy
	}
	for state, meaning := range stateReasons {
		if text, ok := strings.CutSuffix(reason, meaning); ok {
			return cause{text, xid(number)}, state
		}
	}
	return cause{reason, xid(number)}, recovering
}
