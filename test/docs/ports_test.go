package docs

import (
	"path/filepath"
	"regexp"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

// Each default port has one use: extender, device plugin and MPS daemons can share a machine's network.
func TestDefaultPorts(t *testing.T) {
	files, err := filepath.Glob("../../cmd/*/*.go")
	check.Must(t, err)
	flags := map[string]string{}
	for _, file := range files {
		for _, flag := range regexp.MustCompile(`"([a-z-]*address)", "[^"]*:(\d+)"`).FindAllStringSubmatch(read(t, file[len("../../"):]), -1) {
			name, port := file+": --"+flag[1], flag[2]
			if other := flags[port]; other != "" {
				t.Errorf("%s and %s have the default port %s", other, name, port)
			}
			flags[port] = name
		}
	}
	if len(flags) < 4 {
		t.Errorf("too few flags: %v", flags)
	}
}
