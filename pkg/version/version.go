// Package version reports which build is running.
package version

import (
	"fmt"
	"runtime"
)

// Set by the linker (see Makefile): -X github.com/gpushare/gpushare/pkg/version.version=v1.2.3.
var (
	version = "v0.0.0-dev"
	commit  = "unknown"
)

// Info is what `/version` and `--version` show.
type Info struct {
	Version  string `json:"version"`
	Commit   string `json:"commit"`
	Go       string `json:"goVersion"`
	Platform string `json:"platform"`
}

// Get returns the running build.
func Get() Info {
	return Info{Version: version, Commit: commit, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
}

func (i Info) String() string {
	return fmt.Sprintf("%s (commit %s, %s, %s)", i.Version, i.Commit, i.Go, i.Platform)
}
