// Package flagenv lets flags be given as environment variables, as manifests like to have it.
package flagenv

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"
)

// Set takes the flags that weren't given on the command line from environment variables, which are named like the flags
// in capitals: NODE_NAME for --node-name. One letter is no name for a variable.
func Set(flags *pflag.FlagSet, lookup func(string) (string, bool)) error {
	var errs []error
	flags.VisitAll(func(f *pflag.Flag) {
		name := strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		if value, ok := lookup(name); ok && !f.Changed && len(name) > 1 && f.Name != "help" && f.Name != "version" {
			if err := flags.Set(f.Name, value); err != nil {
				errs = append(errs, fmt.Errorf("environment variable %s: %w", name, err))
			}
		}
	})
	return errors.Join(errs...)
}
