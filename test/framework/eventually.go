package framework

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// Patience bounds every wait. It is not a performance target: a state that is not reached by then is not reached at all.
// kube-scheduler itself needs more than a minute to reconnect to an API server that was away for 20 s: its watches wait up
// to 30 s before they retry, and again if the API server has just started and rejects them.
const Patience = 3 * time.Minute

// spareTime is the time before the deadline of the test binary that a failed wait leaves, so that its message, the logs
// and the cleanup come before the binary's panic.
const spareTime = 20 * time.Second

// Eventually polls the condition until it returns nil. When Patience or the test's time is over, it fails the test with
// the condition's last error. what completes "waiting until ...".
func Eventually(t testing.TB, what string, condition func(context.Context) error) {
	t.Helper()
	Within(t, Patience, what, condition)
}

// Within is Eventually with another limit than Patience.
func Within(t testing.TB, limit time.Duration, what string, condition func(context.Context) error) {
	t.Helper()
	if test, ok := t.(interface{ Deadline() (time.Time, bool) }); ok {
		if deadline, ok := test.Deadline(); ok {
			limit = min(limit, time.Until(deadline)-spareTime)
		}
	}
	start := time.Now()
	if last := poll(t.Context(), limit, condition); last != nil {
		t.Fatalf("waiting until %s: not after %s: %v", what, time.Since(start).Round(time.Second/10), last)
	}
}

// poll returns nil as soon as the condition does, or the condition's last error when ctx or the limit ends. The intervals
// grow, so that short waits are short and long waits cost little.
func poll(ctx context.Context, limit time.Duration, condition func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var last error
	intervals := wait.Backoff{Duration: 10 * time.Millisecond, Factor: 1.5, Steps: 8, Cap: 200 * time.Millisecond}
	err := intervals.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		err := condition(ctx)
		if err != nil && (last == nil || ctx.Err() == nil) {
			last = err // Not the error of the ended context.
		}
		return err == nil, nil
	})
	if err != nil && last == nil {
		last = err // The context had ended before.
	}
	if err == nil {
		return nil
	}
	return last
}

// Fetch returns the body of an HTTP GET. Any status but 200 is an error.
func Fetch(ctx context.Context, url string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answers %s: %.200s", url, response.Status, body)
	}
	return body, nil
}
