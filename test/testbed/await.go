package testbed

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// Eventually waits until the condition returns nil, which it asks that often. Where that takes longer than patience the
// test ends, and with the last error says what was still missing.
func Eventually(t testing.TB, often, patience time.Duration, what string, condition func(context.Context) error) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), often, patience, true, func(ctx context.Context) (bool, error) {
		if err := condition(ctx); err != nil {
			if last == nil || ctx.Err() == nil {
				last = err // Not that the time is over.
			}
			return false, nil
		}
		return true, nil
	})
	if err != nil {
		t.Fatalf("waited in vain until %s: %v", what, last)
	}
}

// Fetch gets a page of one of the programs.
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
