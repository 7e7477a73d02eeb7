package gang

import (
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

const (
	// budgetRate is the part of the cluster's memory that groups which can't run may keep reserved in the long run.
	budgetRate = 0.02
	// budgetSaved is for how long they may keep all of it at once, after a time without failures.
	budgetSaved = 20 * time.Second
	// budgetCredit is by how much the groups that never failed may overdraw it.
	budgetCredit = 20 * time.Second
)

// budget bounds the memory that is reserved without success, over all groups. Its unit is memory times seconds. It is refilled at
// a constant rate. A round that ends before the barrier opens and a fruitless starvation reservation cost what they kept
// from others. A round whose members came together costs nothing: the group can run, even if a bind failed.
type budget struct {
	total gpu.Memory
	// balance is what is left, rounds is what would be left without starvation reservations.
	balance, rounds float64
	at              time.Time
}

// refill adds what has accrued since the last call. total is the cluster's shared memory.
func (b *budget) refill(total gpu.Memory, now time.Time) {
	full := float64(total) * budgetSaved.Seconds()
	accrued := full
	if !b.at.IsZero() {
		accrued = float64(total) * budgetRate * now.Sub(b.at).Seconds()
	}
	b.total, b.at = total, now
	b.balance, b.rounds = min(b.balance+accrued, full), min(b.rounds+accrued, full)
}

// chargeRound subtracts the cost of a round.
func (b *budget) chargeRound(memory gpu.Memory, took time.Duration) {
	b.balance -= float64(memory) * took.Seconds()
	b.rounds -= float64(memory) * took.Seconds()
}

// chargeStarvation subtracts the cost of a starvation reservation, in memory times seconds.
func (b *budget) chargeStarvation(cost float64) { b.balance -= cost }

// covers reports whether a round that has cost so much may go on.
func (b *budget) covers(memory gpu.Memory, took time.Duration) bool {
	return b.total == 0 || b.rounds-float64(memory)*took.Seconds() > -float64(b.total)*budgetCredit.Seconds()
}

// allowsRound reports whether a group may reserve memory. Debts of starvation reservations don't keep a group from it
// that never failed. A cluster of unknown memory has no budget.
func (b *budget) allowsRound(failedBefore bool) bool {
	return b.total == 0 || b.balance > 0 || !failedBefore && b.rounds > -float64(b.total)*budgetCredit.Seconds()
}

// allowsStarvation reports whether memory may be reserved for a starving group.
func (b *budget) allowsStarvation(failedBefore bool) bool {
	return b.total == 0 || b.balance > 0 || !failedBefore && b.balance > -float64(b.total)*budgetCredit.Seconds()
}
