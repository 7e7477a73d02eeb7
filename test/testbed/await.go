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

// Eventually polls the condition at the interval often until it returns nil. After patience it fails the test with the
// last error.
func Eventually(t testing.TB, often, patience time.Duration, what string, condition func(context.Context) error) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), often, patience, true, func(ctx context.Context) (bool, error) {
		if err := condition(ctx); err != nil {
			if last == nil || ctx.Err() == nil {
				last = err // Not the error of the ended context.
			}
			return false, nil
		}
		return true, nil
	})
	if err != nil {
		t.Fatalf("timed out waiting until %s: %v", what, last)
	}
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
