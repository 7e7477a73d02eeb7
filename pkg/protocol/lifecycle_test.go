package protocol

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestOverdue(t *testing.T) {
	now := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	pod := annotated(nil)
	expect(t, "not being deleted", false, Overdue(pod, now))
	for name, tc := range map[string]struct {
		since time.Duration // Since the end of the grace period.
		want  bool
	}{
		"within its grace period":         {-time.Hour, false},
		"deleted without a grace period":  {0, false},
		"its grace period has just ended": {OverdueMargin, false},
		"its grace period ended long ago": {OverdueMargin + time.Second, true},
	} {
		pod.DeletionTimestamp = &metav1.Time{Time: now.Add(-tc.since)}
		expect(t, name, tc.want, Overdue(pod, now))
	}
}
