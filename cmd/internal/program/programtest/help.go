// Package programtest checks what all programs have in common.
package programtest

import (
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// CheckHelp fails the test if the help of a flag has more than two sentences: details are for docs/.
func CheckHelp(t *testing.T, flags *pflag.FlagSet) {
	t.Helper()
	flags.VisitAll(func(f *pflag.Flag) {
		if strings.Count(f.Usage, ". ") > 1 {
			t.Errorf("the help of --%s has more than two sentences", f.Name)
		}
	})
}
