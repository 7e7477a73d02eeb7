package controlplane

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"time"
)

// HTTPReady returns a Process.Ready that succeeds once url answers with status 200. It doesn't verify the certificate:
// the port is reserved on loopback for this server.
func HTTPReady(url string) func(context.Context) error {
	client := &http.Client{
		Timeout: 2 * time.Second,
		Transport: &http.Transport{
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // See above.
			DisableKeepAlives: true,
		},
	}
	return func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		response, err := client.Do(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		body, _ := io.ReadAll(io.LimitReader(response.Body, 1024))
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s: %s", url, response.Status, body)
		}
		return nil
	}
}
