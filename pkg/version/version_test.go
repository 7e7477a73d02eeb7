package version

import (
	"runtime"
	"testing"
)

func TestStringHasItAllOnOneLine(t *testing.T) {
	info := Info{Version: "v1.2.3", Commit: "abc", Go: "go1.26", Platform: "linux/amd64"}
	if got, want := info.String(), "v1.2.3 (commit abc, go1.26, linux/amd64)"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := Get(); got.Version == "" || got.Commit == "" || got.Go != runtime.Version() || got.Platform != runtime.GOOS+"/"+runtime.GOARCH {
		t.Errorf("Get: %+v", got)
	}
}
