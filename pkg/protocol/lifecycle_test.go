package protocol

import (
	"testing"
	"time"
)

func TestOverdue(t *testing.T) {
	now := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	for name, tc := range map[string]struct {
		since time.Duration // Since the end of the grace period.
		want  bool
	}{
		"within its grace period":         {-time.Hour, false},
		"deleted without a grace period":  {0, false},
		"its grace period has just ended": {OverdueMargin, false},
		"its grace period ended long ago": {OverdueMargin + time.Second, true},
	} {
		expect(t, name, tc.want, Overdue(now.Add(-tc.since), now))
	}
}
