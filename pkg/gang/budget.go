package gang

import (
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// budget bounds the memory that starvation reservations without success keep from others. Its unit is memory times seconds. It is refilled at a
// constant rate.
type budget struct {
	total gpu.Memory
	left  account
	at    time.Time
}

// account is an amount of memory times seconds.
type account float64

const (
	// starvationRate is the part of the cluster's memory that may be kept in the long run.
	starvationRate = 0.005
	// saved is for how long all of it may be kept at once, after a time without failures.
	saved = 20 * time.Second
	// starvationCredit is by how much groups that never failed may overdraw the account.
	starvationCredit = 10 * time.Second
	// longestDebt is after what time a debt is paid, whatever its cost was: a group that needs a long starvation reservation must get it
	// some time.
	longestDebt = time.Hour
)

// seconds returns all memory times d.
func (b *budget) seconds(d time.Duration) account { return account(float64(b.total) * d.Seconds()) }

// refill adds what has accrued since the last call. total is the cluster's shared memory.
func (b *budget) refill(total gpu.Memory, now time.Time) {
	b.total = total
	if b.at.IsZero() {
		b.left = b.seconds(saved)
	} else {
		b.left = min(b.left+starvationRate*b.seconds(now.Sub(b.at)), b.seconds(saved))
	}
	b.at = now
}

// charge subtracts the cost of a starvation reservation.
func (b *budget) charge(cost account) {
	b.left = max(b.left-cost, -starvationRate*b.seconds(longestDebt))
}

// allows reports whether memory may be reserved for a starving group. A cluster of unknown memory has no budget.
func (b *budget) allows(failedBefore bool) bool {
	return b.total == 0 || b.left > 0 || !failedBefore && b.left > -b.seconds(starvationCredit)
}
