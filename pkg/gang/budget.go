package gang

import (
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// budget bounds the memory that all groups together reserve without success. Its unit is memory times seconds. It has two
// accounts, one for rounds and one for starvation reservations, which are refilled at constant rates.
//
// A round that ends before the barrier opens costs what it kept from others. A round that the budget doesn't allow yields, and costs
// nothing (see plan.yields). A round whose members have all arrived costs nothing either, even if a bind fails, because the group can
// run. A starvation reservation without success costs the free memory that it kept from others. Its cost doesn't prevent rounds.
type budget struct {
	total              gpu.Memory
	rounds, starvation account
	at                 time.Time
}

// account is what is left for one purpose, in memory times seconds.
type account float64

const (
	// roundRate and starvationRate are the parts of the cluster's memory that may be kept in the long run.
	roundRate, starvationRate = 0.02, 0.005
	// saved is for how long all of it may be kept at once, after a time without failures.
	saved = 20 * time.Second
	// roundCredit and starvationCredit are by how much groups that never failed may overdraw the account.
	roundCredit, starvationCredit = 20 * time.Second, 10 * time.Second
	// longestDebt is after what time a debt is paid, whatever its cost was: a group that needs a long starvation reservation must get it
	// some time, and a round is long only if this process or its machine stood still.
	longestDebt = time.Hour
)

// seconds returns all memory times d.
func (b *budget) seconds(d time.Duration) account { return account(float64(b.total) * d.Seconds()) }

// refill adds what has accrued since the last call. total is the cluster's shared memory.
func (b *budget) refill(total gpu.Memory, now time.Time) {
	b.total = total
	if b.at.IsZero() {
		b.rounds, b.starvation = b.seconds(saved), b.seconds(saved)
	} else {
		since := b.seconds(now.Sub(b.at))
		b.rounds, b.starvation = min(b.rounds+roundRate*since, b.seconds(saved)), min(b.starvation+starvationRate*since, b.seconds(saved))
	}
	b.at = now
}

// chargeRound subtracts the cost of a round.
func (b *budget) chargeRound(memory gpu.Memory, took time.Duration) {
	b.rounds = max(b.rounds-account(float64(memory)*took.Seconds()), -roundRate*b.seconds(longestDebt))
}

// chargeStarvation subtracts the cost of a starvation reservation.
func (b *budget) chargeStarvation(cost account) {
	b.starvation = max(b.starvation-cost, -starvationRate*b.seconds(longestDebt))
}

// covers reports whether a round with this cost so far may continue.
func (b *budget) covers(memory gpu.Memory, took time.Duration) bool {
	return b.total == 0 || b.rounds-account(float64(memory)*took.Seconds()) > -b.seconds(roundCredit)
}

// allowsRound reports whether a group may reserve memory. A cluster of unknown memory has no budget.
func (b *budget) allowsRound(failedBefore bool) bool {
	return b.total == 0 || b.rounds > 0 || !failedBefore && b.rounds > -b.seconds(roundCredit)
}

// allowsStarvation reports whether memory may be reserved for a starving group.
func (b *budget) allowsStarvation(failedBefore bool) bool {
	return b.total == 0 || b.starvation > 0 || !failedBefore && b.starvation > -b.seconds(starvationCredit)
}
